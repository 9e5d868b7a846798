"""Two learners that hold the weights in parts compute what one process does, and hold half of the weights each."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner_batches import BATCHES, CONFIG, STEP, TREES, create, train, whole
from naive import relative_error, run
from processes import processes_below
from turnwise.config.files import load_config
from turnwise.engine.budget import gathered_bytes
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.device_info import DeviceInfo, find_device
from turnwise.engine.engine import Engine
from turnwise.engine.learners import sharded
from turnwise.engine.learners.sharded import ShardedEngine
from turnwise.engine.training.sharded_weights import ShardedFullWeights
from turnwise.engine.training.trainable import Trainable
from turnwise.errors import CheckpointError, ConfigError, LearnerError
from turnwise.models.facts import read_facts
from turnwise.rollout.limits import RolloutLimits
from turnwise.training.memory import estimate_memory
from turnwise.types import SampleRequest, SamplingParams

SHARDED = ClusterConfig(learners=2, shard=True, deadline_s=120)
LIMITS = RolloutLimits(max_turns=4, max_tokens_per_turn=16, max_trajectory_tokens=128)


@pytest.fixture(scope="module")
def engines(model_dirs: dict[str, Path]) -> Iterator[tuple[Engine, ShardedEngine]]:
    one = Engine(model_dirs["qwen3"], CONFIG, name="one")
    two = ShardedEngine(model_dirs["qwen3"], CONFIG, SHARDED, name="two")
    yield one, two
    two.close()


@pytest.mark.parametrize(("kind", "batch"), [
    *(("lora", name) for name in ("grpo", "tree", "ppo", "gspo", "dpo")),
    *(("full", name) for name in ("grpo", "ppo", "dpo")),
    ("critic", "critic"),
])  # fmt: skip
def test_learners_with_parts_of_the_weights_train_what_one_trains(
    engines: tuple[Engine, ShardedEngine], kind: str, batch: str
) -> None:
    one, two = engines
    alone, together = (create(engine, kind) for engine in engines)
    datums, loss, settings = BATCHES[batch]
    for engine, own in ((one, alone), (two, together)):
        run(engine.forward_backward(own, datums, loss, settings))
    if kind == "full":
        assert relative_error(whole(two, together, "grad"), whole(one, alone, "grad")) < 1e-5
    norms = [engine.optim_step(own, STEP)["grad_norm"] for engine, own in ((one, alone), (two, together))]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    first = [whole(engine, own, "exp_avg") for engine, own in ((one, alone), (two, together))]
    assert relative_error(first[1], first[0]) < 1e-5, "the summed gradient, which the step has cleared"
    histories = [train(engine, own, batch, 4) for engine, own in ((one, alone), (two, together))]
    for expected, found in zip(*histories, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert relative_error(whole(two, together, "masters"), whole(one, alone, "masters")) < 1e-5
    for engine, own in ((one, alone), (two, together)):
        engine.drop_adapter(own)


def test_each_learner_holds_half_of_the_base_weights(engines: tuple[Engine, ShardedEngine]) -> None:
    one, two = engines
    two.drop_adapter(create(two, "lora"))  # learners start with the first trainable
    whole_bytes = one.model.num_base_bytes
    assert whole_bytes == 4 * one.model.layout.num_parameters
    assert sorted(two.base_bytes) == [0, 1]
    for held in two.base_bytes.values():
        assert whole_bytes / 2 <= held < 0.52 * whole_bytes, "but for the numbers that fill parts up"
    assert sum(parameter.nbytes for parameter in two.model.body.parameters()) == 0
    assert two.model.shards is not None
    config = load_config("guess_number", ["model=x", "cluster.learners=2", "cluster.shard=true"])
    device, facts = find_device(CONFIG), read_facts(two.model_dir)
    planned = estimate_memory(config, CONFIG, device, facts, LIMITS, num_attempts=8).gathered
    assert planned >= gathered_bytes(two.model.shards.largest_unit, device, is_full=False), "the plan has room for them"
    full = create(two, "full")
    assert full.num_bytes < 0.52 * create(one, "full").num_bytes
    two.drop_adapter(full)


def test_parts_of_two_learners_go_on_with_three_and_then_with_one(
    engines: tuple[Engine, ShardedEngine], model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    one, two = engines
    reference = create(one, "full")
    train(one, reference, "grpo", 4)
    three = ShardedEngine(model_dirs["qwen3"], CONFIG, SHARDED.model_copy(update={"learners": 3}), name="three")
    try:
        before: Path | None = None
        for engine, steps in ((two, 1), (three, 2), (one, 1)):
            own = create(engine, "full")
            if before is not None:
                engine.load_adapter(own, before, with_optimizer=True)
            train(engine, own, "grpo", steps)
            before = tmp_path / engine.name
            engine.save_adapter(own, before, with_optimizer=True)
            written = {path.name for path in before.rglob("*.distcp")}
            assert len(written) == {one: 0, two: 2, three: 3}[engine], "every learner writes its own file"
        assert own.num_steps == 4
        assert relative_error(whole(one, own, "masters"), whole(one, reference, "masters")) < 1e-5
        assert relative_error(whole(one, own, "exp_avg"), whole(one, reference, "exp_avg")) < 1e-5
    finally:
        three.close()


def test_a_sharded_checkpoint_goes_on_with_another_count_of_learners(
    engines: tuple[Engine, ShardedEngine], tmp_path: Path
) -> None:
    one, two = engines
    reference = create(one, "full")
    train(one, reference, "ppo", 4)
    for first, second in ((one, two), (two, one), (two, two)):
        trainable = create(first, "full")
        train(first, trainable, "ppo", 2)
        directory = tmp_path / f"{type(first).__name__}{type(second).__name__}"
        first.save_adapter(trainable, directory, with_optimizer=True)
        names = {path.name for path in directory.rglob("*")}
        assert ({"__0_0.distcp", "__1_0.distcp"} <= names) == (first is two), "every learner writes its own file"
        other = second.create_saved(directory, None)
        second.load_adapter(other, directory, with_optimizer=True)
        train(second, other, "ppo", 2)
        assert other.num_steps == 4
        assert relative_error(whole(second, other, "masters"), whole(one, reference, "masters")) < 1e-5


def test_a_sharded_checkpoint_is_a_hugging_face_directory_too(
    engines: tuple[Engine, ShardedEngine], tmp_path: Path
) -> None:
    _, two = engines
    trainable = create(two, "full")
    assert isinstance(trainable, ShardedFullWeights)
    train(two, trainable, "grpo", 1)
    two.save_adapter(trainable, tmp_path / "saved", with_optimizer=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    masters = two.gather(trainable, "masters")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name]), name


def test_a_damaged_sharded_checkpoint_is_refused_by_all_and_the_learners_go_on(
    engines: tuple[Engine, ShardedEngine], tmp_path: Path
) -> None:
    one, two = engines
    alone, together = create(one, "full"), create(two, "full")
    train(two, together, "grpo", 1)
    two.save_adapter(together, tmp_path / "saved", with_optimizer=True)
    before = whole(two, together, "masters")
    parts = tmp_path / "saved" / "sharded"
    text = (parts / "state.json").read_text()

    def check_refused(said: str) -> None:
        for engine, own in ((one, alone), (two, together)):
            with pytest.raises(CheckpointError, match=said):
                engine.load_adapter(own, tmp_path / "saved", with_optimizer=True)

    (parts / "state.json").write_text(json.dumps({**json.loads(text), "layout": "another"}))
    check_refused("lie in another order")
    (parts / "state.json").write_text(text)
    (parts / "__1_0.distcp").unlink()
    check_refused(r"sharded could not be read: learner \d: FileNotFoundError")
    assert torch.equal(whole(two, together, "masters"), before), "nothing was taken over"
    assert train(two, together, "grpo", 1)[0]["grad_norm"] > 0


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_sampler_over_parts_draws_what_one_draws(engines: tuple[Engine, ShardedEngine], kind: str) -> None:
    drawn = []
    for engine in engines:
        trainable = create(engine, kind)
        train(engine, trainable, "grpo", 1)
        policy = engine.publish(trainable)
        train(engine, trainable, "grpo", 1)  # a published version does not move
        replies: list[Any] = []
        request = SampleRequest([5, 6, 7], SamplingParams(max_tokens=6, seed=1, temperature=0.7))
        engine.sampler.submit(request, policy, on_done=replies.append)
        while engine.sampler.has_work:
            engine.sample_step()
        drawn.append(replies[0].sequences[0])
        output = run(engine.score(policy, BATCHES["grpo"][0][:2]))
        drawn[-1] = (drawn[-1], output.loss_fn_outputs[0]["logprobs"].to_numpy())
    assert drawn[1][0].tokens == drawn[0][0].tokens
    assert drawn[1][0].logprobs == pytest.approx(drawn[0][0].logprobs, abs=1e-5)
    assert drawn[1][1] == pytest.approx(drawn[0][1], abs=1e-5)


def test_whole_weights_of_another_model_are_refused_by_name(
    engines: tuple[Engine, ShardedEngine], model_dirs: dict[str, Path]
) -> None:
    _, two = engines
    with pytest.raises(ConfigError, match=r"cluster\.shard=true keeps the weights in parts"):
        two.load_policy(model_dirs["qwen3"])
    adapter = create(two, "lora")
    settings = {"kl_coef": 0.1, "kl_reference": str(model_dirs["qwen3"])}
    with pytest.raises(ConfigError, match=r"cluster\.shard=true keeps the weights in parts"):
        run(two.forward_backward(adapter, TREES, "ppo", settings))
    assert train(two, adapter, "grpo", 1)[0]["grad_norm"] > 0, "and the learners go on"


def test_a_lost_learner_is_started_again_unless_it_held_weights_in_training(
    model_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = processes_below(os.getpid())
    engine = ShardedEngine(model_dirs["llama"], CONFIG, SHARDED, name="two")
    alone = Engine(model_dirs["llama"], CONFIG, name="one")

    def kill() -> None:
        (learner,) = processes_below(os.getpid()) - others
        os.kill(learner, signal.SIGKILL)

    def draw(one: Engine, trainable: Trainable, disturb: Callable[[], None]) -> list[list[int]]:
        """Tokens of four replies; the engine with learners is disturbed in the middle of them."""
        policy, done = one.publish(trainable), list[Any]()
        params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, stop=[])
        for prompt in ([3, 5, 7, 9], [3, 5, 8]):
            one.sampler.submit(SampleRequest(prompt, params, num_samples=2), policy, on_done=done.append)
        for number in itertools.count():
            if not one.sampler.has_work:
                return sorted(list(sequence.tokens) for response in done for sequence in response.sequences)
            if number == 3 and one is engine:
                disturb()
            one.sample_step()
        raise AssertionError("it has work for ever")

    try:
        expected, found = create(alone, "lora"), create(engine, "lora")
        train(alone, expected, "grpo", 2)
        train(engine, found, "grpo", 1)
        kill()
        train(engine, found, "grpo", 1)
        assert engine.num_restarts == 1
        assert relative_error(found.flat, expected.flat) < 1e-5
        replies = [draw(one, trainable, kill) for one, trainable in ((alone, expected), (engine, found))]
        assert replies[1] == replies[0], "a learner that is lost while the run samples is started again too"
        assert engine.num_restarts == 2
        full = create(engine, "full")
        engine.save_adapter(full, tmp_path / "whole", with_optimizer=True)
        write = sharded.do_shard_files
        monkeypatch.setattr(sharded, "do_shard_files", lambda *given: (kill(), write(*given)))
        started_s = time.monotonic()
        with pytest.raises(LearnerError, match=r"learner 1 .* was asked to write its part of a checkpoint and ended"):
            engine.save_adapter(full, tmp_path / "half", with_optimizer=True)
        assert time.monotonic() - started_s < SHARDED.deadline_s / 2, "its death is seen, not waited for"
        assert [place.name for place in tmp_path.iterdir()] == ["whole"], "no half of a checkpoint is left"
        with pytest.raises(LearnerError, match="held a part of the weights in training"):
            train(engine, full, "grpo", 1)
    finally:
        engine.close()
        alone.close()


def test_a_part_of_the_weights_on_a_gpu_is_not_tested_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharded, "find_device", lambda _: DeviceInfo(kind="cuda", dtype="bfloat16"))
    assert not sharded.leader_config(EngineConfig(), "my_model").self_test
    assert "my_model is not tested at load" in caplog.text
    caplog.clear()
    monkeypatch.setattr(sharded, "find_device", lambda _: DeviceInfo(kind="cpu", dtype="float32"))
    assert sharded.leader_config(EngineConfig(), "my_model").self_test
    assert not caplog.text
