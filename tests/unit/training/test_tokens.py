"""Every token that is sampled for training is counted once: what is learned from, what is not, and what fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from turnwise.client.publish import VersionedSampler
from turnwise.envs.base import EnvStep, Task
from turnwise.rollout.stats import RolloutStats
from turnwise.runlog.reader import RunReader
from turnwise.runlog.writer import RunWriter
from turnwise.training.checkpoint import NOTHING_DONE, Start, best_evaluation, read_state
from turnwise.training.pretrain import Batches
from turnwise.training.progress import num_drawn_tokens, num_taken_tokens
from turnwise.trajectory import Message
from turnwise.watch.report import report_lines
from unit.training.conftest import CoinEnv, CoinWorld, MakeRig

TOKENS_PER_STEP = 2 * 12 * 3
"""Groups, attempts and tokens of the rig's steps."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all replies that attempts get, whatever becomes of them."""
    sizes: list[int] = []
    add_sampled = RolloutStats.add_sampled

    def add(stats: RolloutStats, num_tokens: int) -> None:
        sizes.append(num_tokens)
        add_sampled(stats, num_tokens)

    monkeypatch.setattr(RolloutStats, "add_sampled", add)
    return sizes


async def test_a_run_that_plays_ahead_counts_what_nobody_came_to_learn_from(
    make_rig: MakeRig, drawn: list[int]
) -> None:
    bound = 5 * TOKENS_PER_STEP
    ahead = {"steps": 50, "max_staleness": 2, "max_sampled_tokens": bound}
    rig = make_rig({"train": ahead, "eval": {"tasks": 0}})
    await rig.loop().run()
    run = rig.run()
    (end,) = run.events("tokens_spent")
    learned = sum(value for _, value in run.metric("rollout/tokens_drawn"))
    assert num_drawn_tokens(run, end.step) == end.detail["sampled_tokens"] == sum(drawn) > learned
    assert bound <= sum(drawn) < bound + 3 * TOKENS_PER_STEP, "the bound is on what is sampled, learned from or not"
    for step, waiting in run.metric("pool/tokens_drawn"):
        assert num_drawn_tokens(run, step) == num_taken_tokens(run, step) + waiting


async def test_a_run_that_ends_at_its_bound_on_tokens_says_so(make_rig: MakeRig) -> None:
    rig = make_rig({"train": {"steps": 9, "max_sampled_tokens": TOKENS_PER_STEP + 1}, "eval": {"tasks": 0}})
    await rig.loop().run()
    (event,) = rig.run().events()
    told = {"steps": 9, "sampled_tokens": 2 * TOKENS_PER_STEP, "bound": TOKENS_PER_STEP + 1}
    assert (event.kind, event.step, event.detail) == ("tokens_spent", 2, told)
    line = "ended early   after step 2 of 9: 144 tokens are sampled, train.max_sampled_tokens=73"
    assert line in report_lines(rig.run(), best_evaluation(rig.run()), title="coin", num_dialogues=0)
    writer = RunWriter.reopen(rig.directory, max_size_mb=1)
    writer.event(2, "resumed", path="x")
    writer.close()
    assert line not in report_lines(rig.run(), best_evaluation(rig.run()), title="coin", num_dialogues=0), (
        "it went on from there"
    )


async def test_groups_that_a_process_left_in_the_middle_of_a_step_are_not_spent_yet(
    make_rig: MakeRig, drawn: list[int]
) -> None:
    rig = make_rig({"train": {"steps": 2, "max_sampled_tokens": 1}, "eval": {"tasks": 0}})
    supply, start = rig.loop().supply, read_state(NOTHING_DONE, [], tasks_per_step=2)
    await supply.check()
    supply.open(VersionedSampler(await rig.trainer.save_weights_and_get_sampling_client_async(), 0), 0, start, 2)
    assert supply.stream is not None
    playing = asyncio.create_task(supply.stream.take())
    while supply.num_untaken_tokens < TOKENS_PER_STEP // 2:
        await asyncio.sleep(0)
    playing.cancel()
    await supply.close()
    state = supply.state(start)
    rig.directory = rig.directory.with_name("resumed")
    await rig.loop().run(Start(state=state))
    assert [step for step, _ in rig.run().metric("time/step_s")] == [1], "the step that they were played for is made"
    assert num_drawn_tokens(rig.run(), 1) == TOKENS_PER_STEP <= sum(drawn), "what is played again counts once"


def test_batches_of_the_critic_that_a_resume_repeats_do_not_count(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", "", max_size_mb=1)
    for batch in (1, 2, 3):
        writer.metrics(batch, {"critic/sampled_tokens": 100.0})
    writer.commit(0)
    with RunReader(tmp_path / "run") as run:
        assert [num_taken_tokens(run, 0, critic_batches=count) for count in (0, 2, 50)] == [0, 200, 300]


@dataclass(frozen=True, slots=True)
class BrittleWorld(CoinWorld):
    """Every third attempt fails after its reply."""

    numbers: Iterator[int] = field(default_factory=itertools.count)

    def make_env(self, task: Task, seed: int) -> CoinEnv:  # noqa: ARG002
        return BrittleEnv(is_right=next(self.numbers) % 3 > 0)


class BrittleEnv(CoinEnv):
    async def step(self, reply: Message) -> EnvStep:
        if not self.is_right:
            raise ConnectionError("gone")
        return await CoinEnv.step(self, reply)


async def test_the_critics_batches_count_the_tokens_of_attempts_that_fail(make_rig: MakeRig, drawn: list[int]) -> None:
    rig = make_rig({"rollout": {"max_retries": 0, "min_group_size": 2}})
    rig.world = BrittleWorld()
    sampler = await rig.trainer.save_weights_and_get_sampling_client_async()
    batch = await Batches(rig.parts(), rig.renderer, "rollouts").batch(0, sampler)
    kept = sum(one.num_sampled_tokens for one in batch.trajectories)
    assert batch.num_drawn == sum(drawn) > kept > 0
