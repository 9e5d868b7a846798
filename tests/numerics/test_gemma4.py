"""What the table of families does not show of Gemma 4 (heads of two sizes, shared keys) and of models with eyes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Gemma3TextConfig

from cases import for_each
from naive import displaced_adapter, make_model, random_ids, rl_datum, run
from turnwise.bench.families import load_plain, plain_logprobs
from turnwise.bench.family_samples import family_samples
from turnwise.engine import device_info
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.merge import write_merged
from turnwise.engine.training.combine import combine_full
from turnwise.models.facts import read_facts, whole_name
from turnwise.models.families import language_config
from turnwise.models.layer_keys import LayerKeys, gemma4_keys
from turnwise.models.tiny import build_tokenizer
from turnwise.runtime import tolerances
from turnwise.types import AdamParams, LoraConfig

SAMPLES = {one.name: one for one in family_samples() if one.name.startswith(("gemma3", "gemma4", "mistral3"))}
WITH_EYES = ["gemma3", "gemma4", "mistral3"]
DATUMS = [rl_datum(random_ids(40, seed), start=20, seed=seed) for seed in range(2)]


def load(directory: Path, **settings: Any) -> Engine:
    config = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.01, **settings}
    return Engine(directory, EngineConfig.model_validate(config), name="gemma")


def own_logprobs(engine: Engine, policy: Any) -> list[torch.Tensor]:
    output = run(engine.forward(policy, DATUMS, "cross_entropy", None))
    return [columns["logprobs"].to_torch() for columns in output.loss_fn_outputs]


def plain(directory: Path) -> list[torch.Tensor]:
    model = load_plain(directory)
    with torch.no_grad():
        ids = [
            [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])]
            for datum in DATUMS
        ]
        return [plain_logprobs(model, one) for one in ids]


@for_each("name", sorted(SAMPLES))
def test_the_plan_counts_matrices_and_cache_as_the_engine_makes_them(name: str, tmp_path: Path) -> None:
    directory = make_model(SAMPLES[name].config(), tmp_path / name)
    engine, facts = load(directory), read_facts(directory)
    assert facts.linears == engine.model.shapes
    assert facts.keys == engine.model.sizes.keys
    assert facts.num_parameters <= engine.model.layout.num_parameters + 2 * facts.num_layers  # scalars of the layers
    cache = engine.sampler.cache
    by_token = {id(side): side[0, 0].numel() for layer in range(facts.num_layers) for side in cache.layer(layer)}
    assert sum(by_token.values()) == facts.kv_values_per_token
    widths = [shape.outputs for name, shape in facts.linears.items() if name.endswith("mlp.up_proj")]
    assert facts.inner_size == sum(widths) / facts.num_layers


def test_layers_that_share_keys_have_one_cache() -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": 7,
        "num_kv_shared_layers": 3,
        "head_dim": 8,
        "num_key_value_heads": 2,
    }
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"] * 2 + ["sliding_attention"]
    local, whole = (2, 8), (2, 512)
    sources = [(local, 0), (whole, 1), (local, 2), (local, 3), (whole, 1), (local, 3), (whole, 1)]
    assert gemma4_keys(config) == tuple(LayerKeys(*heads, source) for heads, source in sources)


def test_a_published_config_says_the_same_as_what_transformers_makes_of_it(tmp_path: Path) -> None:
    text = {"model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32}
    for more in ({}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, {"num_global_key_value_heads": 1}):
        written = {**text, "num_key_value_heads": 4, **more}
        (tmp_path / "config.json").write_text(json.dumps(written))
        read = AutoConfig.from_pretrained(tmp_path)
        assert gemma4_keys(read.to_dict()) == gemma4_keys(written)
        layers = [read.per_layer_config[layer] for layer in range(6)]
        assert [(own.num_key_value_heads, own.head_dim) for own in layers] == [k[:2] for k in gemma4_keys(written)]


@for_each("name", WITH_EYES)
def test_an_adapter_of_a_model_with_eyes_is_merged_into_its_language_model(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    directory = make_model(SAMPLES[name].config(), place / "base")
    build_tokenizer().save(str(directory / "tokenizer.json"))
    engine = load(directory)
    adapter = displaced_adapter(engine, rank=3)
    engine.save_adapter(adapter, place / "adapter", with_optimizer=False)
    write_merged(place / "adapter", directory, place / "merged")
    again = load(place / "merged")
    for merged in (plain(place / "merged"), own_logprobs(again, again.create_adapter(LoraConfig(rank=1)))):
        for got, want in zip(merged, own_logprobs(engine, adapter), strict=True):
            assert float((got - want).abs().max()) < tolerances.LOGPROBS
    assert any("vision_tower" in name for name in load_file(place / "merged" / "model.safetensors"))


@for_each("name", WITH_EYES)
def test_an_engine_holds_the_language_model_alone(name: str, tmp_path: Path) -> None:
    engine = load(make_model(SAMPLES[name].config(), tmp_path / name))
    held = set(engine.model.layout.parameters)
    assert held
    assert {name for name in held if not name.startswith(("model.language_model.", "lm_head."))} == set()


def test_names_of_older_files_are_those_of_transformers() -> None:
    names = {
        "language_model.model.layers.0.mlp.up_proj.weight": "model.language_model.layers.0.mlp.up_proj.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.norm.weight": "model.language_model.norm.weight",
        "vision_tower.encoder.layers.0.mlp.fc1.weight": "vision_tower.encoder.layers.0.mlp.fc1.weight",
    }
    assert {name: whole_name(name) for name in names} == names


def test_a_config_of_gemma_3_that_leaves_sizes_out_has_those_of_transformers() -> None:
    """As published for 4B: `text_config` has neither heads nor a vocabulary."""
    said = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    read = Gemma3TextConfig(**said).to_dict()
    ours = language_config({"model_type": "gemma3", "text_config": said})
    assert len(ours) > len(said)
    assert {name: read[name] for name in ours} == dict(ours)


def test_the_self_test_passes_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_info, "lacking_for_bfloat16", lambda: "")  # kernels emulate what a processor lacks
    for name in ("gemma4_text, shared keys", "gemma4_text, experts"):
        engine = load(make_model(SAMPLES[name].config(), tmp_path / name), dtype="bfloat16")
        tables = [module.weight for module in engine.model.body.modules() if isinstance(module, torch.nn.Embedding)]
        assert {table.dtype for table in tables} == {torch.bfloat16}, "the widest tables are not widened"


@for_each("model", WITH_EYES)
def test_all_weights_are_saved_with_what_is_not_trained(model: str, tmp_path: Path) -> None:
    """The scalars of the layers are no parameters, and the eyes are not loaded."""
    tmp_path = tmp_path / model
    directory = make_model(SAMPLES[model].config(), tmp_path / "base")
    engine = load(directory)
    trained = engine.create_full()
    run(engine.forward_backward(trained, DATUMS, "importance_sampling", None))
    engine.optim_step(trained, AdamParams(learning_rate=1e-2))
    expected = own_logprobs(engine, trained)
    for name, with_optimizer in (("weights", False), ("state", True)):
        engine.save_adapter(trained, tmp_path / name, with_optimizer=with_optimizer)
        for got, want in zip(plain(tmp_path / name), expected, strict=True):
            assert float((got - want).abs().max()) < tolerances.LOGPROBS
        again = load(directory)
        back = again.create_full()
        again.load_adapter(back, tmp_path / name, with_optimizer=with_optimizer)
        assert torch.equal(back.flat, trained.flat)


@for_each("model", WITH_EYES)
def test_full_weights_of_a_model_with_eyes_are_averaged_without_the_eyes(model: str, tmp_path: Path) -> None:
    place = tmp_path / model
    directory = make_model(SAMPLES[model].config(), place / "base")
    engine = load(directory)
    engine.save_adapter(engine.create_full(), place / "saved", with_optimizer=False)
    combine_full([(place / "saved", 0.5)] * 2, directory, place / "mean", "sum", 1.0)
    base, mean = (load_plain(one).state_dict() for one in (directory, place / "mean"))
    assert base.keys() == mean.keys()
    assert all(torch.equal(tensor, mean[name]) for name, tensor in base.items())
