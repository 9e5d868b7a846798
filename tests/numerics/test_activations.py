"""Less memory for activations, the same gradients: layers that run again, and long sequences in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from naive import NaiveModel, displaced_adapter, make_model, random_ids, relative_error, rl_datum, run
from turnwise.bench.family_samples import FamilySample, family_samples
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.kept import KeptChoice, KeptRoom, PassSizes
from turnwise.engine.model.trace import find_layers
from turnwise.errors import ConfigError
from turnwise.runtime import tolerances
from turnwise.types import Datum

PLAIN_LAYERS = (
    "gemma2",
    "gemma4_text, shared keys",
    "gpt_neox",
    "gpt_oss",
    "granitemoe",
    "opt",
    "phi3, window",
    "starcoder2",
)
"""Models that run transformers' layers: windows, soft caps, sinks, experts, other norms, keys of other layers."""
DIALOGUES = [rl_datum(random_ids(30, 1) + random_ids(9 + i, 10 + i), start=20, seed=i) for i in range(3)]
LONG = rl_datum(random_ids(300, 3), start=40, seed=4)
LATE = rl_datum(random_ids(303, 5), start=150, seed=6)
"""Nothing is trained in its first parts, and its parts are not equally long."""


def load(directory: Path, **settings: Any) -> Engine:
    options = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.01, "self_test": False}
    return Engine(directory, EngineConfig.model_validate({**options, **settings}), name="a model")


def sample_of(name: str, directory: Path, **settings: Any) -> Path:
    (found,) = (one for one in family_samples() if one.name == name)
    chosen = FamilySample(name=name, model_type=found.model_type, settings={**found.settings, **settings})
    return make_model(chosen.config(), directory)


def gradient(engine: Engine, datums: list[Datum], loss: str = "importance_sampling") -> torch.Tensor:
    adapter = displaced_adapter(engine, rank=4)
    run(engine.forward_backward(adapter, datums, loss, None))
    assert adapter.grad.norm() > 0
    return adapter.grad


def full_gradient(engine: Engine, datums: list[Datum]) -> torch.Tensor:
    trainable = engine.create_full()
    run(engine.forward_backward(trainable, datums, "importance_sampling", None))
    return trainable.grad


def test_layers_of_transformers_that_run_again_give_the_same_gradient(tmp_path: Path) -> None:
    for name in PLAIN_LAYERS:
        directory = sample_of(name, tmp_path / name)
        kept, again = load(directory, activations="keep"), load(directory, activations="recompute")
        assert kept.model.fused is None, name
        runs: list[int] = []
        first = next(find_layers(again.model.body, again.model.sizes.num_layers)[0].children())
        first.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        assert relative_error(gradient(again, DIALOGUES), gradient(kept, DIALOGUES)) < 1e-6, name
        assert len(runs) == 2, name


def test_all_weights_of_layers_that_run_again_have_the_same_gradient(tmp_path: Path) -> None:
    for name in ("starcoder2", "gemma4_text, shared keys"):
        directory = sample_of(name, tmp_path / name)
        kept, again = (full_gradient(load(directory, activations=one), DIALOGUES) for one in ("keep", "recompute"))
        assert relative_error(again, kept) < 1e-6, name


@pytest.mark.parametrize("name", ["qwen3", "mistral, window", "qwen2_moe"])
def test_a_long_sequence_in_parts_has_the_gradient_of_one_pass(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = sample_of(name, tmp_path, max_position_embeddings=512)
    whole = load(directory, micro_batch_tokens=64, activations="keep")
    parts = load(directory, micro_batch_tokens=64, activations="split")
    body = parts.model.fused
    assert body is not None
    longest: list[int] = []
    run_block = body.run_block
    monkeypatch.setattr(body, "run_block", lambda i, h, w: (longest.append(len(h.h)), run_block(i, h, w))[1])
    for loss in ("importance_sampling", "gspo"):  # of single positions, and of whole sequences
        assert relative_error(gradient(parts, [LONG], loss), gradient(whole, [LONG], loss)) < tolerances.GRADIENTS
    assert max(longest) <= 64
    assert len(longest) == 2 * 2 * 5 * 2  # losses, forward and again, parts, layers
    for datum in (LONG, LATE):
        assert relative_error(full_gradient(parts, [datum]), full_gradient(whole, [datum])) < tolerances.GRADIENTS
    assert relative_error(gradient(parts, [LATE]), gradient(whole, [LATE])) < tolerances.GRADIENTS
    assert {60, 61} <= set(longest)
    longest.clear()
    gradient(parts, DIALOGUES)  # a pass of several dialogues is not cut: 30 shared tokens, and 27 of their own
    assert longest == [57] * 4


def test_parts_have_the_gradient_of_a_dense_reference(tmp_path: Path) -> None:
    directory = sample_of("qwen3", tmp_path, max_position_embeddings=512)
    engine = load(directory, micro_batch_tokens=50, activations="split")
    adapter = displaced_adapter(engine, rank=4)
    naive = NaiveModel(directory, adapter)
    weights = torch.tensor(LONG.loss_fn_inputs["mask"].to_numpy())
    datum = Datum(LONG.model_input, {"target_tokens": LONG.loss_fn_inputs["target_tokens"], "weights": weights})
    output = run(engine.forward_backward(adapter, [datum], "cross_entropy", None))
    logprobs = naive.logprobs(datum)
    (-(logprobs * weights).sum()).backward()
    ours = output.loss_fn_outputs[0]["logprobs"].to_torch()
    assert float(((ours - logprobs.detach()) * weights).abs().max()) < tolerances.LOGPROBS
    for name, (a, b) in naive.grads().items():
        for got, want in zip(adapter.grad_pairs[name], (a, b), strict=True):
            assert relative_error(got, want) < tolerances.GRADIENTS, name


def test_auto_takes_the_first_way_that_fits(tmp_path: Path) -> None:
    engine = load(sample_of("qwen3", tmp_path))
    one = PassSizes(engine.model.sizes, 4, 4, engine.model.ops.facts)
    assert one.past < one.recomputed < one.kept
    count = 100_000

    def chosen(most: int, *, can_split: bool = True, **options: Any) -> KeptChoice:
        return KeptRoom(most, **options).choose(one, count, can_split=can_split)

    assert chosen(count * one.kept) == KeptChoice(keeps_all=True)
    assert chosen(count * one.kept - 1) == KeptChoice(keeps_all=False)
    assert chosen(count * one.recomputed) == KeptChoice(keeps_all=False)
    assert chosen(count * one.recomputed - 1).part_tokens > 0
    assert chosen(count * one.past + 1000 * one.kept).part_tokens == 1000
    assert chosen(0).part_tokens == 256
    assert chosen(0, can_split=False) == chosen(0, activations="recompute") == KeptChoice(keeps_all=False)
    assert chosen(0, activations="keep") == KeptChoice(keeps_all=True)
    assert chosen(count * one.kept, activations="split", most_part_tokens=512).part_tokens == 512


def test_a_model_with_layers_of_transformers_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.activations=split"):
        load(sample_of("starcoder2", tmp_path), activations="split")
