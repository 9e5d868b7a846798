"""Merged adapters change the model as the weighted sum of their changes does; full weights follow the formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from naive import assert_close, displaced_adapter, random_ids, rl_datum, run
from turnwise.engine.engine import Engine
from turnwise.engine.training.adapter_files import read_lora_config, read_pairs
from turnwise.engine.training.combine import slerp_tensors, sum_adapters, sum_tensors, ties_tensors
from turnwise.errors import CheckpointError

MakeEngine = Callable[..., Engine]
IDS = random_ids(30, 1)
WEIGHTS = (0.7, -0.4)


def _peft_adapter(base: Path, out: Path) -> Path:
    """An adapter that PEFT wrote, with a scale and ranks that are not ours."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options = PeftLoraConfig(r=3, lora_alpha=7, rank_pattern={"q_proj": 5}, use_rslora=True, target_modules=targets)
    adapted = get_peft_model(model, options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(str(out))
    return out


def _delta(directory: Path, name: str) -> torch.Tensor:
    pair = read_pairs(directory)[name]
    return (pair.b.double() @ pair.a.double()) * pair.scale


def test_a_merged_adapter_is_the_weighted_sum_for_us_and_for_peft(
    arch_dir: Path, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(arch_dir)
    engine.save_adapter(displaced_adapter(engine, rank=4, train_unembed=False), tmp_path / "a", with_optimizer=False)
    parts = [(tmp_path / "a", WEIGHTS[0]), (_peft_adapter(arch_dir, tmp_path / "b"), WEIGHTS[1])]
    shape = sum_adapters(parts, tmp_path / "out", str(arch_dir))
    assert shape.rank == 4 + 5, "the largest sum of ranks; smaller ones are filled with zeros"
    assert read_lora_config(tmp_path / "out") == shape

    naive = AutoModelForCausalLM.from_pretrained(arch_dir, dtype=torch.float32)
    for name in read_pairs(tmp_path / "a"):
        wanted = torch.stack([weight * _delta(directory, name) for directory, weight in parts]).sum(0)
        assert_close(_delta(tmp_path / "out", name).numpy(), wanted.numpy(), 1e-6)
        with torch.no_grad():
            naive.get_parameter(f"{name}.weight").add_(wanted.float())
    base = AutoModelForCausalLM.from_pretrained(arch_dir, dtype=torch.float32)
    ids = torch.tensor([IDS])
    with torch.no_grad():
        by_hand = naive(ids).logits
        by_peft = PeftModel.from_pretrained(base, tmp_path / "out")(ids).logits
    assert_close(by_peft.numpy(), by_hand.numpy(), 1e-4)
    adapter = engine.create_adapter(shape)
    engine.load_adapter(adapter, tmp_path / "out", with_optimizer=False)
    ours = run(engine.forward(adapter, [rl_datum(IDS, start=0)], "importance_sampling", None)).loss_fn_outputs[0]
    expected = torch.log_softmax(by_hand[0, :-1], -1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert_close(ours["logprobs"].to_numpy(), expected.numpy(), 1e-4)


def test_adapters_of_unlike_modules_are_refused_by_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    for name, targets in (("a", {}), ("b", {"train_mlp": False})):
        engine.save_adapter(displaced_adapter(engine, **targets), tmp_path / name, with_optimizer=False)
    parts = [(tmp_path / "b", 0.5), (tmp_path / "a", 0.5)]
    with pytest.raises(CheckpointError, match=r"a adapts model.layers.0.mlp.down_proj and 5 more, and .*b does not"):
        sum_adapters(parts, tmp_path / "out", "base")
    assert not (tmp_path / "out").exists()


def test_full_weights_are_combined_as_by_hand() -> None:
    base = torch.tensor([1.0, 1.0, 1.0, 1.0])
    first, second = torch.tensor([3.0, 1.0, 0.0, 1.1]), torch.tensor([0.0, 5.0, 0.5, 1.2])
    torch.testing.assert_close(sum_tensors(base, [first, second], [0.5, 2.0]), torch.tensor([0.0, 9.0, -0.5, 1.45]))
    # Changes: [2, 0, -1, .1] and [-1, 4, -.5, .2]; half of them are kept: [2, 0, -1, 0] and [-1, 4, 0, 0].
    # Elected signs with equal weights: + + - 0. Means of those that agree: 2, 4, -1, 0.
    merged = ties_tensors(base, [first, second], [0.5, 0.5], density=0.5)
    torch.testing.assert_close(merged, torch.tensor([3.0, 5.0, 0.0, 1.0]))
    # With three times the weight the second part wins the first value: 2 * 1 < 1 * 3.
    merged = ties_tensors(base, [first, second], [1.0, 3.0], density=0.5)
    torch.testing.assert_close(merged, torch.tensor([0.0, 5.0, 0.0, 1.0]))
    # Both agree on the third value where all is kept: the weighted mean of -1 and -0.5.
    merged = ties_tensors(base, [first, second], [1.0, 3.0], density=1.0)
    torch.testing.assert_close(merged[2:], torch.tensor([1 - 0.625, 1 + 0.175]))


def test_slerp_goes_along_the_circle_and_along_the_line_where_there_is_no_circle() -> None:
    east, north = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    torch.testing.assert_close(slerp_tensors(east, north, 0.5), torch.tensor([[0.5**0.5, 0.5**0.5]]))
    torch.testing.assert_close(slerp_tensors(east, north, 1 / 3), torch.tensor([[0.75**0.5, 0.5]]))
    torch.testing.assert_close(slerp_tensors(east, north, 0.0), east)
    torch.testing.assert_close(slerp_tensors(east, north, 1.0), north)
    torch.testing.assert_close(slerp_tensors(east, 3 * east, 0.25), 1.5 * east)
    torch.testing.assert_close(slerp_tensors(0 * east, north, 0.25), 0.25 * north)
