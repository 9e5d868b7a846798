"""Every family that is let in computes what transformers computes; every other one is refused from its config alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from naive import displaced_adapter, make_model, random_ids, relative_error, rl_datum, run, sample
from turnwise.bench.families import compare_all, load_plain, plain_logprobs
from turnwise.bench.family_page import FamilyRow, family_table
from turnwise.bench.family_samples import SHAPE, VARIANTS, FamilySample, family_samples
from turnwise.cli import main
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.errors import ConfigError, DataError, ModelError
from turnwise.models.config import ModelConfig
from turnwise.models.facts import read_facts
from turnwise.models.families import (
    FAMILIES,
    Family,
    add_family,
    check_supported,
    context_length,
    layer_windows,
    qwen3_block,
)
from turnwise.models.linears import linear_kind
from turnwise.runtime import tolerances
from turnwise.types import LoraConfig

(LONG_PHI,) = (sample.settings for sample in VARIANTS if sample.name == "phi3, LongRoPE")


CPU = EngineConfig(device="cpu", dtype="float32")


def small_config(family: str) -> PretrainedConfig:
    return FamilySample(name=family, model_type=family).config()


def largest_error(engine: Engine, directory: Path) -> float:
    """Of logprobs against transformers' own: alone, packed beside a longer dialogue, and decoded."""
    model = load_plain(directory)
    adapter = engine.create_adapter(LoraConfig(rank=2, seed=1, train_mlp=False))
    short, long = random_ids(24, 1), random_ids(180, 2)

    def expected(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return plain_logprobs(model, ids)

    errors: list[torch.Tensor] = []
    for batch in ([short], [short, long]):
        output = run(engine.forward(adapter, [rl_datum(ids, 0) for ids in batch], "cross_entropy", None))
        for ids, columns in zip(batch, output.loss_fn_outputs, strict=True):
            errors.append(columns["logprobs"].to_torch() - expected(ids))
    for prompt in (short, long):
        (reply,) = sample(engine, prompt, engine.base_policy, max_tokens=12, seed=1, temperature=1.0).sequences
        want = expected([*prompt, *reply.tokens])[len(prompt) - 1 :]
        errors.append(torch.tensor(reply.logprobs) - want)
    return max(float(error.abs().max()) for error in errors)


def wrong_rows(rows: Sequence[FamilyRow]) -> list[FamilyRow]:
    """Those that differ, and those whose training moved too little for a difference to show."""
    return [row for row in rows if row.moved < 0.05 or not row.differences.largest <= tolerances.LOGPROBS]


def test_every_family_computes_and_learns_what_transformers_and_peft_do() -> None:
    rows, failures = compare_all(family_samples(), CPU)
    assert failures == {}
    assert len({sample.model_type for sample in family_samples()}) >= 35
    assert wrong_rows(rows) == []


@pytest.mark.gpu
def test_every_family_computes_and_learns_what_transformers_and_peft_do_on_a_gpu() -> None:
    settings = EngineConfig(device="cuda", dtype="float32")
    rows, failures = compare_all(family_samples(), settings)
    print(family_table(rows))
    assert (failures, wrong_rows(rows)) == ({}, [])


def test_the_plan_counts_what_the_engine_makes_of_every_family(tmp_path: Path) -> None:
    for family in sorted(FAMILIES):
        directory = make_model(small_config(family), tmp_path / family)
        engine = Engine(directory, CPU.model_copy(update={"kv_cache_gib": 0.01, "self_test": False}), name=family)
        facts = read_facts(directory)
        flags = {"train_mlp": "mlp" in {linear_kind(name) for name in engine.model.shapes}}
        model = ModelConfig.model_validate({"rank": 3, **flags})
        adapter = engine.create_adapter(LoraConfig(rank=3, **flags))
        assert facts.num_adapter_parameters(model) == adapter.flat.numel(), family
        assert facts.context_length == engine.max_context_length, family
        assert facts.kv_values_per_token == engine.model.sizes.kv_values_per_token, family


def test_a_family_described_from_outside_runs_the_fused_body(tmp_path: Path) -> None:
    """A model that transformers knows under another name, and whose block has the parts of a Llama with head norms."""

    class ToyConfig(Qwen3Config):
        model_type = "toy_family"

    class ToyForCausalLM(Qwen3ForCausalLM):
        config_class = ToyConfig

    AutoConfig.register("toy_family", ToyConfig)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)
    settings = EngineConfig(device="cpu", dtype="float32", kv_cache_gib=0.01)
    directory = make_model(ToyConfig(**SHAPE, head_dim=8), tmp_path)
    with pytest.raises(ModelError, match="toy_family is not among the supported families"):
        Engine(directory, settings, name="toy")
    add_family(Family(model_type="toy_family", describe=qwen3_block))
    try:
        engine = Engine(directory, settings, name="toy")
        assert engine.model.fused is not None
        assert largest_error(engine, directory) < tolerances.LOGPROBS
        with pytest.raises(ConfigError, match="already"):
            add_family(Family(model_type="toy_family"))
    finally:
        del FAMILIES["toy_family"]


def test_families_with_a_description_have_the_gradients_of_the_modelling_code(tmp_path: Path) -> None:
    prefix = random_ids(40, 1)
    datums = [rl_datum(prefix + random_ids(10 + i, 10 + i), start=30, seed=i) for i in range(3)]
    for name in [name for name, family in FAMILIES.items() if family.describe is not None]:
        directory = make_model(small_config(name), tmp_path / name)
        grads = []
        for is_fused in (True, False):
            engine = Engine(directory, EngineConfig(device="cpu", dtype="float32", kv_cache_gib=0.01), name=name)
            assert engine.model.fused is not None, name
            if not is_fused:
                engine.model.fused = None
            adapter = displaced_adapter(engine, rank=4)
            run(engine.forward_backward(adapter, datums, "importance_sampling", None))
            grads.append(adapter.grad.clone())
        assert grads[0].norm() > 0
        assert relative_error(grads[0], grads[1]) < 1e-4, name


def test_a_block_with_a_part_that_the_kernels_lack_runs_transformers_code(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, hidden_act="gelu")
    engine = Engine(make_model(config, tmp_path), EngineConfig(device="cpu", kv_cache_gib=0.01), name="gelu")
    assert engine.model.fused is None
    assert largest_error(engine, tmp_path) < tolerances.LOGPROBS


def test_a_rotation_that_grows_with_the_context_is_right_within_it(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    directory = make_model(LlamaConfig(**SHAPE, rope_parameters=rope), tmp_path)
    engine = Engine(directory, EngineConfig(device="cpu", dtype="float32", kv_cache_gib=0.01), name="dynamic")
    assert largest_error(engine, directory) < tolerances.LOGPROBS


def test_what_would_be_wrong_or_die_is_refused_by_name_by_plan_eval_chat_and_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused: dict[str, PretrainedConfig] = {}
    refused |= {family: CONFIG_MAPPING[family]() for family in ("diffllama", "gpt2", "falcon", "gptj", "deepseek_v3")}
    refused |= {family: CONFIG_MAPPING[family]() for family in ("bert", "stablelm", "nemotron", "t5", "qwen3_next")}
    refused |= {family: CONFIG_MAPPING[family]() for family in ("qwen3_5_text", "lfm2", "gemma3n_text")}
    for named, config in refused.items():
        directory = tmp_path / config.model_type
        config.save_pretrained(directory)
        (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        for command in (
            ["train", "guess_number", f"model={directory}", "--plan", "--no-time"],
            ["train", "guess_number", f"model={directory}", f"run.dir={tmp_path / 'run'}"],
            ["eval", str(directory), "--env", "guess_number"],
            ["sample", str(directory)],
            ["serve", "--model", str(directory), "--port", "0", "--data-dir", str(tmp_path / "service")],
        ):
            assert main(command) != 0, command
            err = capsys.readouterr().err
            assert named in err, (command, err)
            assert "not " in err, (command, err)
            assert "Traceback" not in err, (command, err)
    assert not (tmp_path / "run").exists()


def test_the_context_ends_where_long_rope_changes_its_factors(tmp_path: Path) -> None:
    config = FamilySample(name="", model_type="phi3", settings=LONG_PHI).config()
    directory = make_model(config, tmp_path)
    engine = Engine(directory, CPU.model_copy(update={"kv_cache_gib": 0.01}), name="long")
    assert engine.max_context_length == read_facts(directory).context_length == 192
    adapter = engine.create_adapter(LoraConfig(rank=2, seed=1))
    short, long = rl_datum(random_ids(20, 1), 0), rl_datum(random_ids(191, 2), 0)
    alone, beside = (run(engine.forward(adapter, datums, "cross_entropy", None)) for datums in ([short], [short, long]))
    first, second = (output.loss_fn_outputs[0]["logprobs"].to_torch() for output in (alone, beside))
    assert float((first - second).abs().max()) < 1e-5
    with pytest.raises(DataError, match="192"):
        run(engine.forward(adapter, [rl_datum(random_ids(200, 3), 0)], "cross_entropy", None))
    with pytest.raises(DataError, match="192"):
        sample(engine, random_ids(200, 3), engine.base_policy, max_tokens=4)


def test_long_rope_is_known_by_all_its_names() -> None:
    for kind in ({"rope_type": "longrope"}, {"type": "longrope"}, {"type": "su"}):
        for key in ("rope_scaling", "rope_parameters"):
            config = {"model_type": "phi3", "sliding_window": None, "max_position_embeddings": 131072}
            assert context_length({**config, key: kind, "original_max_position_embeddings": 4096}) == 4096
            assert context_length({**config, key: {**kind, "original_max_position_embeddings": 4096}}) == 4096
    with pytest.raises(ModelError, match="LongRoPE"):
        check_supported({"model_type": "phi3", "rope_parameters": {"full_attention": {"rope_type": "longrope"}}})


def test_a_config_says_the_same_before_and_after_transformers_has_read_it(tmp_path: Path) -> None:
    """A window that a config file leaves unsaid is there all the same, and the plan knows that as the engine does."""
    size = {"num_hidden_layers": 8, "max_position_embeddings": 8200}
    told = ({}, {"sliding_window": 512}, {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1})
    for family, more in itertools.product(sorted(FAMILIES), told):
        written = {"model_type": family, **size, **more}
        (tmp_path / "config.json").write_text(json.dumps(written))
        read = AutoConfig.from_pretrained(tmp_path).to_dict()
        check_supported(written)
        check_supported(read)
        if family != "qwen2_moe":  # nobody writes its list in a config; the engine reads what transformers makes of it
            assert layer_windows(written) == layer_windows(read), written


def test_a_window_as_long_as_the_context_of_the_engine_is_none(tmp_path: Path) -> None:
    config = FamilySample(name="mistral", model_type="mistral", settings={"sliding_window": 64}).config()
    directory, ids = make_model(config, tmp_path), random_ids(64, 3)
    for context, windows in ((64, (None,)), (65, (64,)), (0, (64,))):
        settings = CPU.model_copy(update={"kv_cache_gib": 0.01, "context_length": context})
        engine = Engine(directory, settings, name="mistral")
        facts = read_facts(directory, wanted_context=context)
        assert facts.kv_windows == engine.model.sizes.kv_windows == windows, context
        ours = run(engine.score(engine.base_policy, [rl_datum(ids, 0)])).loss_fn_outputs[0]["logprobs"].to_torch()
        with torch.no_grad():
            theirs = plain_logprobs(load_plain(directory), ids)
        assert float((ours - theirs).abs().max()) < tolerances.LOGPROBS, context


def test_the_plan_says_what_the_adapter_lies_on_and_what_it_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_model(small_config("qwen2_moe"), tmp_path / "qwen2_moe")
    assert (
        main(["train", "guess_number", f"model={directory}", "model.train_unembed=false", "--plan", "--no-time"]) == 0
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("adapters")]
    assert "self_attn (k_proj o_proj q_proj v_proj)" in line
    assert "mlp.shared_expert (down_proj gate_proj up_proj)" in line
    assert "not adapted: lm_head" in line
    assert "mlp.experts (down_proj gate_up_proj)" in line
    assert "each of 4 experts with rank 8" in line
    assert "routers are not adapted (256 of" in line
    directory = make_model(small_config("phimoe"), tmp_path / "phimoe")
    assert main(["train", "guess_number", f"model={directory}", "--plan", "--no-time"]) == 0
    assert "routers cannot be adapted (256 of" in capsys.readouterr().out
    assert main(["train", "guess_number", f"model={directory}", "model.train_router=true", "--plan"]) != 0
    assert "train_router=True" in capsys.readouterr().err
