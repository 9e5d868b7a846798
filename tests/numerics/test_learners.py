"""Two learner processes compute what one does: gradients, metrics, weights after steps; and a dead one is named."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner_batches import BATCHES, CONFIG, STEP, TREES, create, train
from naive import relative_error, run
from processes import processes_below
from turnwise.engine.config import ClusterConfig
from turnwise.engine.engine import Engine
from turnwise.engine.learners import collective, places, replicated
from turnwise.engine.learners.calls import LearnerCall, MeetCall
from turnwise.engine.learners.group import LearnerGroup
from turnwise.engine.learners.replicated import ReplicatedEngine
from turnwise.engine.training import columns
from turnwise.engine.training.trainable import Trainable
from turnwise.errors import ConfigError, DataError, LearnerError, LearnerLostError
from turnwise.types import Datum, ModelInput


@pytest.fixture(scope="module")
def engines(model_dirs: dict[str, Path]) -> Iterator[tuple[Engine, ReplicatedEngine]]:
    """One engine alone, and one that leads a second process."""
    one = Engine(model_dirs["qwen3"], CONFIG, name="one")
    two = ReplicatedEngine(model_dirs["qwen3"], CONFIG, ClusterConfig(learners=2, deadline_s=60), name="two")
    yield one, two
    two.close()


@pytest.mark.parametrize(("kind", "batch"), [
    *(("lora", name) for name in ("grpo", "tree", "ppo", "gspo", "dpo")),
    *(("full", name) for name in ("grpo", "ppo", "dpo")),
    ("critic", "critic"),
])  # fmt: skip
def test_two_learners_train_what_one_trains(engines: tuple[Engine, ReplicatedEngine], kind: str, batch: str) -> None:
    ours = [create(engine, kind) for engine in engines]
    datums, loss, settings = BATCHES[batch]
    both = list(zip(engines, ours, strict=True))
    outputs: list[Any] = [run(engine.forward_backward(own, datums, loss, settings)) for engine, own in both]
    for alone, together in zip(outputs[0].loss_fn_outputs, outputs[1].loss_fn_outputs, strict=True):
        for name, values in alone.items():
            np.testing.assert_allclose(together[name].to_numpy(), values.to_numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
    assert not torch.equal(ours[0].grad, ours[1].grad), "the second process has a part of it"
    metrics = [engine.optim_step(own, STEP) for engine, own in both]
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-5)
    assert relative_error(ours[1].exp_avg, ours[0].exp_avg) < 1e-5, "the summed gradient, which the step has cleared"
    histories = [train(engine, own, batch, 4) for engine, own in both]
    for alone, together in zip(*histories, strict=True):
        assert together == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert relative_error(ours[1].flat, ours[0].flat) < 1e-5
    for engine, own in both:
        engine.drop_adapter(own)


def test_three_learners_train_all_weights_as_one_does(
    engines: tuple[Engine, ReplicatedEngine], model_dirs: dict[str, Path]
) -> None:
    cluster = ClusterConfig(learners=3, deadline_s=60)
    three = ReplicatedEngine(model_dirs["qwen3"], CONFIG, cluster, name="three")
    try:
        alone, together = ((one, create(one, "full")) for one in (engines[0], three))
        histories = [train(one, own, "grpo", 3) for one, own in (alone, together)]
        for expected, found in zip(*histories, strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert relative_error(together[1].flat, alone[1].flat) < 1e-5
    finally:
        three.close()


@pytest.mark.parametrize("kind", ["lora", "full", "critic"])
def test_a_state_saved_by_one_count_of_learners_goes_on_with_another(
    engines: tuple[Engine, ReplicatedEngine], kind: str, tmp_path: Path
) -> None:
    batch = "critic" if kind == "critic" else "ppo"
    one, two = engines
    reference = create(one, kind)
    train(one, reference, batch, 4)
    for first, second in ((one, two), (two, one)):
        trainable = create(first, kind)
        train(first, trainable, batch, 2)
        directory = tmp_path / f"{type(first).__name__}"
        first.save_adapter(trainable, directory, with_optimizer=True)
        other = second.create_saved(directory, trainable.lora)
        second.load_adapter(other, directory, with_optimizer=True)
        train(second, other, batch, 2)
        assert other.num_steps == 4
        assert relative_error(other.flat, reference.flat) < 1e-5


def test_a_step_is_undone_for_whatever_is_small_enough_to_be_copied(
    engines: tuple[Engine, ReplicatedEngine],
) -> None:
    _, two = engines
    policy, critic = create(two, "lora"), create(two, "critic")
    for one, batch in ((policy, "grpo"), (critic, "critic")):
        train(two, one, batch, 1)
    before = [[one.flat.clone(), one.exp_avg.clone(), one.exp_avg_sq.clone()] for one in (policy, critic)]
    two.begin_step()
    train(two, policy, "grpo", 2)
    train(two, critic, "critic", 1)
    run(two.forward_backward(policy, TREES, "importance_sampling", None))
    assert two.undo_step()
    for one, kept in zip((policy, critic), before, strict=True):
        found = (one.flat, one.exp_avg, one.exp_avg_sq)
        assert all(torch.equal(*pair) for pair in zip(found, kept, strict=True))
        assert (one.num_steps, one.has_gradient, float(one.grad.abs().max())) == (1, False, 0)
    full = create(two, "full")
    two.begin_step()
    assert two.undo_step(), "nothing has moved"
    train(two, full, "grpo", 1)
    assert not two.undo_step()
    for one in (policy, critic, full):
        two.drop_adapter(one)


def test_values_and_logprobs_are_read_by_all_learners(engines: tuple[Engine, ReplicatedEngine]) -> None:
    for kind, batch, loss in (("critic", "critic", "value"), ("full", "grpo", "cross_entropy")):
        datums = [Datum(d.model_input, {"mask": d.loss_fn_inputs["mask"]}) for d in BATCHES["critic"][0]]
        datums = datums if kind == "critic" else BATCHES[batch][0]
        answers = [run(e.forward(create(e, kind), datums, loss, None)).loss_fn_outputs for e in engines]
        for alone, together in zip(*answers, strict=True):
            for name, values in alone.items():
                np.testing.assert_allclose(together[name].to_numpy(), values.to_numpy(), rtol=1e-5, atol=1e-6)


def test_bad_data_is_refused_and_the_learners_go_on(engines: tuple[Engine, ReplicatedEngine]) -> None:
    _, two = engines
    trainable = create(two, "lora")
    wrong = Datum(ModelInput.from_ints([5, 500]), TREES[0].loss_fn_inputs)
    with pytest.raises(DataError, match="datum 6"):
        run(two.forward_backward(trainable, [*TREES, wrong], "ppo", None))
    with pytest.raises(ConfigError, match="cannot be shared out"):
        two.forward_backward_custom(trainable, TREES, lambda _, logprobs: (logprobs[0].sum(), {}))
    run(two.forward_backward(trainable, TREES, "importance_sampling", None))
    trainable.grad[0] = float("nan")
    with pytest.raises(DataError, match="gradient norm is nan"):
        two.optim_step(trainable, STEP)
    assert train(two, trainable, "grpo", 1)[0]["grad_norm"] > 0


def test_the_first_learner_checks_every_datum_once_before_any_learner_begins(
    engines: tuple[Engine, ReplicatedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, two = engines
    trainable = create(two, "lora")
    checked: list[Datum] = []
    begun: list[int] = []
    check, call = columns.datum_to_columns, LearnerGroup.call

    def count_check(datum: Datum, **given: Any) -> columns.DatumColumns:
        checked.append(datum)
        return check(datum, **given)

    def count_call(group: LearnerGroup, rank: int, message: LearnerCall) -> None:
        begun.append(len(checked))
        call(group, rank, message)

    monkeypatch.setattr(columns, "datum_to_columns", count_check)
    monkeypatch.setattr(LearnerGroup, "call", count_call)
    run(two.forward_backward(trainable, TREES, "importance_sampling", None))
    run(two.forward(trainable, TREES, "importance_sampling", None))
    assert [id(datum) for datum in checked] == [id(datum) for datum in [*TREES, *TREES]]
    assert begun == [len(TREES), 2 * len(TREES)]
    two.drop_adapter(trainable)


class AbsentPeer:
    """A learner that has loaded its model, and never comes to meet the others."""

    rank, name, is_gone = 1, "nobody", False

    def send(self, message: object, deadline_s: float) -> None:  # noqa: ARG002
        self.is_asked_to_meet = isinstance(message, MeetCall)

    def has_answer(self, wait_s: float = 0.0) -> bool:  # noqa: ARG002
        return not self.is_asked_to_meet

    def receive(self) -> tuple[str, Any]:
        return "ready", 0

    def why(self) -> str:
        return "does not answer"

    def end(self) -> None:
        pass

    sampler_link = hang_up = kill = end


def test_learners_that_do_not_meet_are_told_with_the_seconds_that_they_had(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (collective, replicated):
        monkeypatch.setattr(module, "MEET_S", 0.5)
    cluster = ClusterConfig(learners=2, deadline_s=120, max_restarts=0)
    engine = ReplicatedEngine(model_dirs["llama"], CONFIG, cluster, name="two")
    monkeypatch.setattr(places, "start_process", lambda *_given, **_named: AbsentPeer())
    try:
        with pytest.raises(LearnerLostError, match=r"learners could not meet together within 0\.5 s"):
            create(engine, "lora")
    finally:
        engine.close()


def test_a_learner_that_is_stopped_is_missed_although_it_reads_nothing_of_a_large_batch(
    model_dirs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    others = processes_below(os.getpid())
    cluster = ClusterConfig(learners=2, deadline_s=12)
    engine = ReplicatedEngine(model_dirs["llama"], CONFIG, cluster, name="two")
    alone = Engine(model_dirs["llama"], CONFIG, name="one")
    try:
        pairs = [(one, create(one, "lora")) for one in (alone, engine)]
        (learner,) = processes_below(os.getpid()) - others
        os.kill(learner, signal.SIGSTOP)
        large = [copy.deepcopy(datum) for _ in range(100) for datum in TREES]  # 0.7 MB
        for one, policy in pairs:
            run(one.forward_backward(policy, large, "importance_sampling", None))
            one.optim_step(policy, STEP)
        assert engine.num_restarts == 1
        assert f"learner 1 (process {learner}) was asked to take a call and does not answer" in caplog.text
        assert relative_error(pairs[1][1].exp_avg, pairs[0][1].exp_avg) < 1e-5
    finally:
        engine.close()
        alone.close()


def test_a_step_in_which_learners_die_ends_where_one_process_ends(
    model_dirs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """One dies while it starts again, too; the last one that is lost is named, and nothing hangs."""
    others = processes_below(os.getpid())
    cluster = ClusterConfig(learners=2, deadline_s=120, max_restarts=4)
    engine = ReplicatedEngine(model_dirs["llama"], CONFIG, cluster, name="two")
    alone = Engine(model_dirs["llama"], CONFIG, name="one")

    def kill(known: set[int]) -> int:
        """Kill a learner as soon as one is there that is not known: a new one has not loaded its model by then."""
        while not (found := processes_below(os.getpid()) - known):
            time.sleep(0.01)
        (learner,) = found
        os.kill(learner, signal.SIGKILL)
        return learner

    def kill_with_successor() -> threading.Thread:
        killer = threading.Thread(target=kill, args=({*others, kill(others)},))
        killer.start()
        return killer

    def step(one: Engine, policy: Trainable, critic: Trainable, death: str) -> None:
        for number, half in enumerate((TREES[:3], TREES[3:])):  # accumulated: a death loses the gradient of both
            work = one.forward_backward(policy, half, "importance_sampling", None)
            next(work, None)
            _ = kill(others) if death == f"in pass {number}" else None
            run(work)
        run(one.forward_backward(critic, BATCHES["critic"][0], "value", {"value_clip": 0.2}))
        killer = kill_with_successor() if death == "before the step" else None
        one.optim_step(policy, STEP)
        _ = killer.join() if killer is not None else None
        _ = kill(others) if death == "between the steps" else None
        one.optim_step(critic, STEP)

    try:
        pairs = [(create(one, "lora"), create(one, "critic")) for one in (alone, engine)]
        for death in ("", "in pass 1", "before the step", "between the steps"):
            step(alone, *pairs[0], "")
            step(engine, *pairs[1], death)
        assert engine.num_restarts == 4
        warned = [record.getMessage() for record in caplog.records]
        assert len(warned) == 4
        assert all("the run goes on" in one and "resume" not in one for one in warned), "the run was not given up"
        for expected, found in zip(*pairs, strict=True):
            assert found.num_steps == expected.num_steps == 4
            assert relative_error(found.flat, expected.flat) < 1e-5
            assert relative_error(found.exp_avg, expected.exp_avg) < 1e-5
        policy = pairs[1][0]
        before = policy.flat.clone()
        run(engine.forward_backward(policy, TREES, "importance_sampling", None))
        learner = kill(others)
        why = rf"learner 1 \(process {learner}\).*ended with exit code -9. The last checkpoint is kept; resume the run"
        with pytest.raises(LearnerError, match=rf"{why}; .* 4 times"):  # the fifth time is one too many
            engine.optim_step(policy, STEP)
        assert torch.equal(policy.flat, before), "no half of a step"
        with pytest.raises(LearnerError, match="learner 1"):
            run(engine.forward_backward(policy, TREES, "importance_sampling", None))
    finally:
        engine.close()
        alone.close()
    assert processes_below(os.getpid()) - others == set()
