"""gpt-oss as it is published, with experts in MXFP4, is the same model as its plain numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from naive import displaced_adapter, make_model, random_ids, rl_datum, run, sample
from turnwise.bench.family_samples import OWN, SHAPE
from turnwise.cli import main
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.merge import write_merged
from turnwise.errors import ModelError
from turnwise.models.facts import read_facts
from turnwise.models.families import check_supported
from turnwise.models.tiny import build_tokenizer
from turnwise.types import AdamParams

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The values of four bits without the sign, which is the highest of them."""
PACKED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
DATUMS = [rl_datum(random_ids(40, seed), start=20, seed=seed) for seed in range(2)]


def pack_experts(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and the plain numbers [E, inputs, outputs] of random experts."""
    blocks = torch.randint(0, 256, (4, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 126, (4, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    both = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
    plain = (both * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)
    return blocks, scales, plain.transpose(1, 2).contiguous()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in bfloat16, and the same model with packed experts."""
    plain, packed = (tmp_path_factory.mktemp("gpt_oss") / name for name in ("plain", "packed"))
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    make_model(CONFIG_MAPPING["gpt_oss"](**SHAPE | OWN["gpt_oss"] | sizes), plain)
    build_tokenizer().save(str(plain / "tokenizer.json"))
    shutil.copytree(plain, packed)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    kept, generator = dict(tensors), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, outputs = tensors[name].shape
        blocks, scales, numbers = pack_experts(outputs, inputs, generator)
        tensors[name] = numbers.bfloat16()
        assert torch.equal(tensors[name].float(), numbers), "bfloat16 holds them exactly"
        del kept[name]
        kept |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(kept, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(config))
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": PACKED}))
    return plain, packed


def load(directory: Path, **settings: Any) -> Engine:
    config = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.01, "seed": 3, **settings}
    return Engine(directory, EngineConfig.model_validate(config), name=directory.name)


def test_packed_experts_train_and_sample_as_their_plain_numbers(pair: tuple[Path, Path]) -> None:
    engines = [load(directory) for directory in pair]
    adapters = [displaced_adapter(engine, rank=4) for engine in engines]
    for engine, adapter in zip(engines, adapters, strict=True):
        run(engine.forward_backward(adapter, DATUMS, "importance_sampling", None))
    assert torch.equal(adapters[0].grad, adapters[1].grad)
    assert adapters[0].grad.abs().max() > 0
    replies = [
        sample(engine, random_ids(30, 1), engine.publish(adapter), max_tokens=8, seed=1).sequences[0]
        for engine, adapter in zip(engines, adapters, strict=True)
    ]
    assert replies[0].tokens == replies[1].tokens
    assert replies[0].logprobs == replies[1].logprobs


def test_the_plan_counts_packed_experts_as_plain_ones(pair: tuple[Path, Path]) -> None:
    plain, packed = (read_facts(directory) for directory in pair)
    assert (packed.linears, packed.num_parameters) == (plain.linears, plain.num_parameters)
    assert (packed.is_packed, plain.is_packed) == (True, False)


def test_a_merged_export_of_packed_experts_has_plain_numbers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    engine = load(pair[1])
    engine.save_adapter(displaced_adapter(engine, rank=4), tmp_path / "adapter", with_optimizer=False)
    written: list[dict[str, Tensor]] = []
    for base in pair:
        write_merged(tmp_path / "adapter", base, tmp_path / base.name)
        written.append(load_file(tmp_path / base.name / "model.safetensors"))
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())
    assert written[1]["model.layers.0.mlp.experts.down_proj"].dtype is torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "packed" / "config.json").read_text())


def test_all_weights_of_a_packed_model_are_saved_as_plain_numbers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    engine = load(pair[1])
    trained = engine.create_full()
    run(engine.forward_backward(trained, DATUMS, "importance_sampling", None))
    engine.optim_step(trained, AdamParams(learning_rate=1e-3))
    engine.save_adapter(trained, tmp_path / "saved", with_optimizer=False)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    views = engine.model.layout.views(trained.flat)
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, views[name]), name


def test_a_server_that_would_load_packed_experts_is_refused(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"model={pair[1]}", "rollout.backend=vllm", "rollout.url=http://127.0.0.1:9"]
    assert main(["train", "guess_number", *options, "--plan", "--no-time"]) == 2
    assert "is published in MXFP4" in capsys.readouterr().err


def test_other_quantised_models_are_refused() -> None:
    for family, method in (("gpt_oss", "bitsandbytes"), ("llama", "mxfp4")):
        config = {"model_type": family, "quantization_config": {"quant_method": method}}
        with pytest.raises(ModelError, match=f"quantised \\({method}\\)"):
            check_supported(config)
