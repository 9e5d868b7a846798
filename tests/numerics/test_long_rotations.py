"""LongRoPE and dynamic NTK beyond their first length: sampler, trainer and transformers agree, beside any neighbour."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from naive import make_model, random_ids, rl_datum, run, sample, sample_many
from turnwise.bench.families import Angles, plain_logprobs
from turnwise.bench.family_samples import SHAPE, VARIANTS, FamilySample
from turnwise.cli import main
from turnwise.engine import passed_tests
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.rotation import FixedRotation
from turnwise.errors import ConfigError, DataError, ModelError
from turnwise.models.facts import read_facts
from turnwise.models.families import angle_note, context_length
from turnwise.runtime import tolerances
from turnwise.types import LoraConfig, SampleResponse

SWITCH, CONTEXT = 30, 256
BY_LENGTH = Angles(switch=SWITCH)
(LONG_PHI,) = (one.settings for one in VARIANTS if one.name == "phi3, LongRoPE, long")
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.fixture(autouse=True)
def _always_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine even the test of a tiny model takes long, and would not be repeated."""
    monkeypatch.setattr(passed_tests, "LONG_SECONDS", 1e9)


@pytest.fixture(scope="module")
def phi_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other factors for sequences of more than `SWITCH` tokens."""
    config = FamilySample(name="", model_type="phi3", settings=LONG_PHI).config()
    return make_model(config, tmp_path_factory.mktemp("phi"))


@pytest.fixture(scope="module")
def plain(phi_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(phi_dir, dtype=torch.float32, attn_implementation="eager").eval()


def load(directory: Path, **settings: Any) -> Engine:
    options = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.01, "seed": 1, "context_length": CONTEXT}
    return Engine(directory, EngineConfig.model_validate({**options, **settings}), name="long")


def trained_logprobs(engine: Engine, sequences: list[list[int]]) -> list[torch.Tensor]:
    adapter = engine.create_adapter(LoraConfig(rank=2, seed=1))
    datums = [rl_datum(ids, 0) for ids in sequences]
    output = run(engine.forward(adapter, datums, "cross_entropy", None))
    return [columns["logprobs"].to_torch() for columns in output.loss_fn_outputs]


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def check_drawn(engine: Engine, plain: Any, prompt: list[int], reply: SampleResponse) -> None:
    """The logprobs of drawn tokens are those of transformers, and those of the trainer."""
    for drawn in reply.sequences:
        whole = [*prompt, *drawn.tokens]
        with torch.no_grad():
            theirs = plain_logprobs(plain, whole, BY_LENGTH)[len(prompt) - 1 :]
        (learned,) = trained_logprobs(engine, [whole])
        for other in (theirs, learned[len(prompt) - 1 :]):
            assert largest(torch.tensor(drawn.logprobs), other) < tolerances.LOGPROBS


def test_the_two_sets_of_factors_are_far_apart(plain: Any) -> None:
    """Otherwise no test below could fail."""
    ids = random_ids(60, 1)
    with torch.no_grad():
        assert largest(plain_logprobs(plain, ids, BY_LENGTH), plain_logprobs(plain, ids)) > 0.05


def test_a_dialogue_that_grows_beyond_the_switch_in_decode_agrees_with_trainer_and_transformers(
    phi_dir: Path, plain: Any
) -> None:
    engine = load(phi_dir)
    prompts = [random_ids(count, count) for count in (SWITCH - 12, SWITCH - 1, SWITCH, SWITCH + 1, 90, 5)]
    requests = [(prompt, engine.base_policy) for prompt in prompts]
    for prompt, reply in zip(
        prompts, sample_many(engine, requests, num_samples=2, max_tokens=25, temperature=1.0, seed=3), strict=True
    ):
        check_drawn(engine, plain, prompt, reply)


def test_neighbours_and_caches_do_not_change_what_is_drawn(phi_dir: Path) -> None:
    engine = load(phi_dir)
    prompt = random_ids(SWITCH - 10, 4)
    params = {"max_tokens": 25, "temperature": 1.0, "seed": 5}
    alone = sample(engine, prompt, engine.base_policy, **params)
    others = [(random_ids(count, count), engine.base_policy) for count in (7, 60, 21, 22, 23)]
    beside = sample_many(engine, [(prompt, engine.base_policy), *others], **params)[0]
    # Rows give their blocks back and read again: 100 tokens fit.
    small = load(phi_dir, kv_cache_gib=2.4e-5, block_size=4, prefill_tokens=16)
    crowded = sample_many(small, [(prompt, small.base_policy), *others], **params)[0]
    assert alone.sequences[0].tokens == beside.sequences[0].tokens == crowded.sequences[0].tokens
    for other in (beside, crowded):
        assert largest(*(torch.tensor(one.sequences[0].logprobs) for one in (alone, other))) < tolerances.LOGPROBS
    assert small.sampler.scheduler.num_preemptions > 0


def test_the_next_turn_finds_the_blocks_with_its_own_angles_and_no_others(phi_dir: Path, plain: Any) -> None:
    engine = load(phi_dir, block_size=4)
    prompt = random_ids(20, 6)
    first = sample(engine, prompt, engine.base_policy, max_tokens=20, temperature=1.0, seed=1)
    check_drawn(engine, plain, prompt, first)
    longer = [*prompt, *first.sequences[0].tokens, *random_ids(9, 7)]
    second = sample(engine, longer, engine.base_policy, max_tokens=4, temperature=1.0, seed=2)
    check_drawn(engine, plain, longer, second)
    assert second.num_cached_prompt_tokens == 36  # all that the first turn read after it had passed the switch
    fresh = [*prompt, *first.sequences[0].tokens[:5]]
    third = sample(engine, fresh, engine.base_policy, max_tokens=2, temperature=1.0, seed=2)
    check_drawn(engine, plain, fresh, third)
    assert third.num_cached_prompt_tokens == 24  # of the blocks from before the switch


def test_prompt_logprobs_of_a_long_prompt_are_those_of_transformers(phi_dir: Path, plain: Any) -> None:
    engine = load(phi_dir, prefill_tokens=16)
    prompts = [random_ids(count, count) for count in (SWITCH - 1, SWITCH, SWITCH + 1, 80)]
    requests = [(prompt, engine.base_policy) for prompt in prompts]
    replies = sample_many(engine, requests, max_tokens=2, temperature=1.0, prompt_logprobs=True, topk_prompt_logprobs=2)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.prompt_logprobs is not None
        assert reply.topk_prompt_logprobs is not None
        with torch.no_grad():
            want = plain_logprobs(plain, prompt, BY_LENGTH)
        assert largest(torch.tensor(reply.prompt_logprobs[1:]), want) < tolerances.LOGPROBS
        assert len(reply.topk_prompt_logprobs) == len(prompt)


def test_the_gradient_is_the_same_in_any_cut_of_passes(phi_dir: Path) -> None:
    beginning = random_ids(40, 8)
    datums = [rl_datum(beginning + random_ids(count, count), start=10, seed=count) for count in (5, 30, 70)]
    datums.append(rl_datum(random_ids(20, 9), start=3))
    grads = []
    for settings in ({}, {"share_prefixes": False}, {"micro_batch_tokens": 64}):
        engine = load(phi_dir, **settings)
        adapter = engine.create_adapter(LoraConfig(rank=2, seed=1))
        run(engine.forward_backward(adapter, datums, "importance_sampling", None))
        grads.append(adapter.grad.clone())
    assert grads[0].norm() > 0
    for other in grads[1:]:  # against transformers and PEFT: the row of this model in `turnwise bench families`
        assert float((grads[0] - other).norm() / grads[0].norm()) < 1e-5


def test_a_loss_over_whole_sequences_sees_both_sides_of_the_switch(phi_dir: Path) -> None:
    datums = [rl_datum(random_ids(count, count), start=4, seed=count) for count in (20, 70)]
    metrics = []
    for settings in ({}, {"micro_batch_tokens": 16}):
        engine = load(phi_dir, **settings)
        adapter = engine.create_adapter(LoraConfig(rank=2, seed=1))
        metrics.append(run(engine.forward_backward(adapter, datums, "gspo", None)).metrics)
    assert metrics[0]["loss:sum"] == pytest.approx(metrics[1]["loss:sum"], rel=1e-4)
    assert metrics[0]["num_trained_tokens:sum"] == 15 + 65


def test_dynamic_ntk_has_the_angles_of_its_longest_sequence(tmp_path: Path) -> None:
    shape = {**SHAPE, "max_position_embeddings": 100}
    directory = make_model(LlamaConfig(**shape, rope_parameters=DYNAMIC), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    engine = load(directory, context_length=180)
    assert engine.model.fused is not None
    sequences = [random_ids(count, count) for count in (12, 101, 180)]
    with torch.no_grad():
        shorter = plain_logprobs(plain, sequences[1], Angles(context=110))
        want = [plain_logprobs(plain, ids, Angles(context=180)) for ids in sequences]
        assert largest(want[1], shorter) > 0.01  # otherwise the test could not fail
    for ours, theirs in zip(trained_logprobs(engine, sequences), want, strict=True):
        assert largest(ours, theirs) < tolerances.LOGPROBS
    with pytest.raises(DataError, match="180"):
        sample(engine, random_ids(181, 3), engine.base_policy, max_tokens=4)


def test_the_self_test_sees_wrong_angles_of_long_sequences(phi_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = FixedRotation.__init__

    def only_short(self: FixedRotation, rotation: Any, lengths: list[int], device: torch.device) -> None:
        right(self, rotation, [SWITCH] * sum(-(-length // SWITCH) for length in lengths), device)

    monkeypatch.setattr(FixedRotation, "__init__", only_short)
    with pytest.raises(ModelError, match="trainer differs at layer 0 attention"):
        load(phi_dir)


def test_a_context_that_a_model_cannot_have_is_refused(phi_dir: Path) -> None:
    for wanted in (CONTEXT, 1024):
        assert read_facts(phi_dir, wanted_context=wanted).context_length == wanted
    assert read_facts(phi_dir).context_length == SWITCH
    with pytest.raises(ConfigError, match=r"context_length=2000, and this model reads at most 1024"):
        read_facts(phi_dir, wanted_context=2000)
    dynamic = {"model_type": "llama", "max_position_embeddings": 100, "rope_scaling": DYNAMIC}
    assert context_length(dynamic, 200) == 200
    with pytest.raises(ConfigError, match="at most 200"):
        context_length(dynamic, 201)
    with pytest.raises(ConfigError, match="at most 100"):
        context_length({"model_type": "llama", "max_position_embeddings": 100}, 101)


def test_the_plan_prints_the_rule_and_refuses_a_server_with_another_one(
    phi_dir: Path, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(phi_dir, directory)
    for file in tiny_dir.glob("tokenizer*"):
        shutil.copy(file, directory)
    command = ["train", "guess_number", f"model={directory}", "engine.device=cpu", "engine.context_length=256"]
    assert main([*command, "--plan", "--no-time"]) == 0
    assert "angles       a token behind more than 30 is predicted with other angles" in capsys.readouterr().out
    assert main([*command, "rollout.backend=vllm", "rollout.url=http://127.0.0.1:9", "--plan", "--no-time"]) != 0
    assert "engine.context_length=256 goes beyond the first angles" in capsys.readouterr().err


def test_facts_say_where_angles_change(phi_dir: Path) -> None:
    assert "ends at 30 tokens" in read_facts(phi_dir).angle_note
    assert "behind more than 30" in read_facts(phi_dir, wanted_context=CONTEXT).angle_note
    dynamic = {"model_type": "llama", "max_position_embeddings": 100, "rope_scaling": DYNAMIC}
    assert "angles of one of 180 tokens" in angle_note(dynamic, 180)
    assert angle_note({"model_type": "llama", "max_position_embeddings": 100}, 100) == ""
