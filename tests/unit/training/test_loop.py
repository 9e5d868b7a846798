"""The loop, with test doubles: what it calls in which order, and what it writes down."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.commands.status import status_lines
from turnwise.errors import LearnerError
from turnwise.rollout.certify import Certificate
from turnwise.runlog.schema import CheckpointRow
from turnwise.training.checkpoint import Start, read_state
from turnwise.training.learner_news import learner_metrics
from turnwise.training.progress import NothingToLearnError
from turnwise.view.one_run import findings
from turnwise.watch.interrupt import Interrupted
from unit.training.conftest import MakeRig, Rig

PUBLISH = "save_weights_and_get_sampling_client"


async def test_a_step_plays_learns_publishes_and_logs(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 1}})
    await rig.loop().run()
    assert rig.methods_called() == [PUBLISH, PUBLISH, "forward_backward", "optim_step", PUBLISH, "save_state"]
    (call,) = [call for call in rig.trainer.calls if call.method == "forward_backward"]
    assert call.arguments["loss_fn"] == "importance_sampling"
    weights = [w for datum in call.arguments["data"] for w in datum.loss_fn_inputs["weights"].tolist()]
    assert sum(weights) == pytest.approx(1.0)
    run = rig.run()
    assert dict(run.metric("rollout/attempts")) == {1: 24.0}
    assert {row.outcome for row in run.attempts(phase="train")} == {"trained"}
    assert [row.step for row in run.certificates()] == [1]


async def test_evaluations_come_at_the_start_every_so_often_and_at_the_end(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 5}, "eval": {"every": 2}, "warmup": {"steps": 2}})
    await rig.loop().run()
    rows = [(row.label, row.step) for row in rig.run().evaluations()]
    assert rows == [("start", 0), ("warm-up", 0), ("step", 2), ("step", 4), ("end", 5)]


async def test_a_synchronous_step_never_samples_with_what_an_evaluation_has_read(make_rig: MakeRig) -> None:
    """A resumed run does not evaluate again; prompts that an evaluation cached would round its own ones otherwise."""
    rig = make_rig({"train": {"steps": 4}, "eval": {"every": 2}})
    await rig.loop().run()
    one_step = ["forward_backward", "optim_step", PUBLISH]
    after_evaluation = [PUBLISH]
    expected = [PUBLISH, *after_evaluation, *one_step, *one_step, *after_evaluation, *one_step, *one_step]
    assert [name for name in rig.methods_called() if name != "save_state"] == expected


async def test_every_evaluation_plays_the_same_tasks_with_the_same_seeds(make_rig: MakeRig) -> None:
    rig = make_rig({})
    await rig.loop().run()
    run = rig.run()
    first, last = ([run.attempt(row.id).trajectory for row in run.attempts(phase="eval", step=s)] for s in (0, 2))
    assert [(t.task_id, t.seed) for t in first] == [(t.task_id, t.seed) for t in last]


async def test_the_warm_up_is_supervised_counted_apart_and_leaves_a_fresh_optimizer(make_rig: MakeRig) -> None:
    rig = make_rig({"warmup": {"steps": 3, "batch_size": 2}, "train": {"steps": 0}, "eval": {"tasks": 0}})
    await rig.loop().run()
    calls = [call for call in rig.trainer.calls if call.method == "forward_backward"]
    assert [call.arguments["loss_fn"] for call in calls] == ["cross_entropy"] * 3
    assert rig.methods_called()[-5:] == ["save_state", "load_state", "save_state", PUBLISH, "save_state"]
    assert [step for step, _ in rig.run().metric("warmup/loss")] == [1, 2, 3]
    assert rig.run().metric("train/loss") == []


async def test_only_the_assistants_tokens_are_learned_in_the_warm_up(make_rig: MakeRig) -> None:
    rig = make_rig({"warmup": {"steps": 1, "batch_size": 1}, "train": {"steps": 0}, "eval": {"tasks": 0}})
    await rig.loop().run()
    (datum,) = rig.trainer.datums
    mask = datum.loss_fn_inputs["mask"].to_numpy() > 0
    learned = datum.loss_fn_inputs["target_tokens"].to_numpy()[mask].tolist()
    from turnwise.envs.base import assistant

    assert learned == rig.renderer.encode_reply(assistant("heads"))


async def test_substeps_split_the_groups_over_optimizer_steps(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 1, "substeps": 2}, "eval": {"tasks": 0}})
    await rig.loop().run()
    assert rig.methods_called().count("optim_step") == 2
    for call in rig.trainer.calls:
        if call.method == "forward_backward":
            weights = [w for datum in call.arguments["data"] for w in datum.loss_fn_inputs["weights"].tolist()]
            assert sum(weights) == pytest.approx(1.0), "each optimizer step has its own denominator"


async def test_steps_without_a_gradient_are_logged_and_a_row_of_them_raises(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 9, "max_empty_steps": 3}, "eval": {"tasks": 0}}, is_constant=True)
    with pytest.raises(NothingToLearnError, match=r"3 steps in a row .* 6 constant"):
        await rig.loop().run()
    run = rig.run()
    assert dict(run.metric("method/groups_dropped_constant")) == {1: 2.0, 2: 2.0, 3: 2.0}
    assert {row.outcome for row in run.attempts()} == {"constant"}
    assert "optim_step" not in rig.methods_called()


async def test_steps_whose_attempts_all_succeed_end_the_run_well(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 9, "max_empty_steps": 3}}, is_easy=True)
    await rig.loop().run()
    run = rig.run()
    assert [(row.label, row.step) for row in run.evaluations()] == [("start", 0), ("end", 3)]
    assert [row.step for row in run.checkpoints()] == [3]
    assert [event.kind for event in run.events() if event.kind != "finding"] == ["solved"]


async def test_a_run_that_learns_nothing_is_saved_before_it_ends(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 9, "max_empty_steps": 3}, "eval": {"tasks": 0}}, is_constant=True)
    with pytest.raises(NothingToLearnError):
        await rig.loop().run()
    assert [row.step for row in rig.run().checkpoints()] == [3]


async def test_when_attempts_fail_step_after_step_the_error_says_who_failed_and_how(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 9, "max_empty_steps": 2}, "eval": {"tasks": 0}, "rollout": {"max_retries": 0}})

    def broken(_: list[int]) -> list[int]:
        raise ConnectionError("the server is gone")

    rig.trainer = RecordingTrainer(ScriptedSampler(broken))
    expected = r"2 steps in a row .* \(groups: \d+ group_too_small\).* by sampler: .*the server is gone"
    with pytest.raises(NothingToLearnError, match=expected):
        await rig.loop().run()


async def test_a_first_step_that_trains_on_nothing_has_a_certificate_too(make_rig: MakeRig) -> None:
    rig = make_rig({"eval": {"tasks": 0}}, is_constant=True)
    await rig.loop().run()
    rows = rig.run().certificates()
    assert [row.step for row in rows] == [1, 2]
    assert "compared tokens; the step trained none" in "\n".join(Certificate.from_json(rows[0].content).lines())


async def test_checkpoints_come_every_so_often_and_the_oldest_go(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 6, "save_every": 2}, "eval": {"tasks": 0}})
    await rig.loop().run()
    saved = [call.arguments["name"] for call in rig.trainer.calls if call.method == "save_state"]
    assert saved == ["step-000002", "step-000004", "step-000006"]
    assert [row.step for row in rig.run().checkpoints()] == [4, 6]


async def test_an_interrupt_saves_the_last_whole_step(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 50}, "eval": {"tasks": 0}})
    running = asyncio.create_task(rig.loop().run())
    while rig.methods_called().count("optim_step") < 3:
        await asyncio.sleep(0)
    rig.interrupt.ask()
    with pytest.raises(Interrupted):
        await running
    (row,) = rig.run().checkpoints()
    assert row.step == rig.methods_called().count("optim_step")
    assert rig.run().metric("rollout/attempts")[-1][0] == row.step


async def test_a_resumed_run_plays_the_tasks_and_seeds_that_were_next(make_rig: MakeRig) -> None:
    whole = make_rig({"train": {"steps": 4}})
    await whole.loop().run()
    expected = [whole.run().attempt(row.id).trajectory for row in whole.run().attempts(phase="train") if row.step > 2]
    whole.directory = whole.directory.with_name("resumed")
    done = CheckpointRow(step=2, warmup_steps=0, path="tinker://x/weights/y")
    await whole.loop().run(Start(done=done, evaluated=frozenset({("start", 0)})))
    resumed = [whole.run().attempt(row.id).trajectory for row in whole.run().attempts(phase="train")]
    assert [(t.task_id, t.attempt, t.seed) for t in resumed] == [(t.task_id, t.attempt, t.seed) for t in expected]
    assert [(row.label, row.step) for row in whole.run().evaluations()] == [("end", 4)]


async def test_accumulated_batches_make_one_step_with_the_mean_of_their_gradients(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 2, "accumulate": 3}, "eval": {"tasks": 0}})
    await rig.loop().run()
    calls = [name for name in rig.methods_called() if name in ("forward_backward", "optim_step", PUBLISH)]
    one_step = [*["forward_backward"] * 3, "optim_step", PUBLISH]
    assert calls == [PUBLISH, *one_step, *one_step]
    for call in (call for call in rig.trainer.calls if call.method == "forward_backward"):
        weights = [w for datum in call.arguments["data"] for w in datum.loss_fn_inputs["weights"].tolist()]
        assert sum(weights) == pytest.approx(1 / 3), "each batch is normalised by itself, and a third of the step"
    run = rig.run()
    assert dict(run.metric("rollout/attempts")) == {1: 72.0, 2: 72.0}
    tasks = [row.task_id for row in run.attempts(phase="train")]
    assert len(set(tasks)) == 6, "six batches of two tasks deal each of the six tasks twice"


async def test_a_step_that_is_interrupted_between_its_batches_is_played_once_in_all(make_rig: MakeRig) -> None:
    sections = {"train": {"steps": 2, "accumulate": 3}, "eval": {"tasks": 0}}
    whole = make_rig(sections)
    await whole.loop().run()
    expected = [whole.run().attempt(row.id).trajectory for row in whole.run().attempts(phase="train")]
    rig = make_rig(sections)
    rig.directory = whole.directory.with_name("broken")
    running = asyncio.create_task(rig.loop().run())
    while rig.methods_called().count("forward_backward") < 2:
        await asyncio.sleep(0)
    rig.interrupt.ask()
    with pytest.raises(Interrupted):
        await running
    assert "optim_step" not in rig.methods_called()
    run = rig.run()
    (done,) = run.checkpoints()
    state = read_state(done, run.pool(done.step), tasks_per_step=2)
    num_finished = sum(row.outcome is not None for row in state.pool)
    assert (done.step, num_finished) == (0, 4), "the groups of two whole batches wait in the pool"
    again = make_rig(sections)
    again.directory = whole.directory.with_name("resumed")
    await again.loop().run(Start(done=done, state=state))
    resumed = [again.run().attempt(row.id).trajectory for row in again.run().attempts(phase="train")]
    assert [(t.task_id, t.attempt, t.seed) for t in resumed] == [(t.task_id, t.attempt, t.seed) for t in expected]


class LostLearners:
    """Two learners, whose engine can bring back the weights before a step, or cannot."""

    def __init__(self, trainer: RecordingTrainer, *, can_undo: bool) -> None:
        self._trainer, self._can_undo = trainer, can_undo
        self._news = ["learner 1 was lost"]

    def metrics(self) -> dict[str, float]:
        return learner_metrics(2, 1)

    def take_news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def begin_step(self) -> None:
        self._trainer.save_state("mark")

    async def undo_step(self) -> bool:
        self._trainer.load_state("mark")
        return self._can_undo


def lose_learners(rig: Rig, number: int) -> None:
    """The optimizer step of this number ends with the error of learners that are given up."""
    step, done = rig.trainer.optim_step, list[int]()

    def optim_step(*given: Any, **named: Any) -> Any:
        done.append(1)
        if len(done) == number:
            raise LearnerError("learner 1 is gone")
        return step(*given, **named)

    rig.trainer.optim_step = optim_step  # type: ignore[method-assign]


@pytest.mark.parametrize("can_undo", [True, False])
async def test_a_run_that_loses_its_learners_in_a_step_saves_what_was_before_it(
    make_rig: MakeRig, can_undo: bool
) -> None:
    rig = make_rig({"train": {"steps": 4}})
    rig.learners = LostLearners(rig.trainer, can_undo=can_undo)
    lose_learners(rig, 3)
    with pytest.raises(LearnerError, match="learner 1 is gone"):
        await rig.loop().run()
    assert rig.methods_called()[-1] == ("save_state" if can_undo else "load_state")
    run = rig.run()
    saved = run.checkpoints()
    assert [row.step for row in saved] == ([2] if can_undo else [])
    if can_undo:
        state = read_state(Start(done=saved[0]).done, run.pool(2), tasks_per_step=2)
        assert state.version == 2
        assert len(state.pool) == 2, "the groups of the step that was lost wait to be learned from"


async def test_learners_that_were_lost_are_on_record(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 2}})
    rig.learners = LostLearners(rig.trainer, can_undo=True)
    await rig.loop().run()
    run = rig.run()
    assert [(event.step, event.detail["text"]) for event in run.events("learners_changed")] == [
        (1, "learner 1 was lost")
    ]
    assert dict(run.metric("learners/count")) == {1: 2.0, 2: 2.0}
    assert dict(run.metric("learners/restarts")) == {1: 1.0, 2: 1.0}
    (finding, *_) = findings(run)
    assert (finding["title"], finding["text"]) == ("learners were lost at step 1", "learner 1 was lost")
    assert "learners 1 warnings, the last one at step 1: learner 1 was lost" in status_lines(run, None, is_alive=False)
