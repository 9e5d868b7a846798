"""The pool: who may start, who is learned from next, and that nobody is lost, doubled, starved or too old."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.envs.base import Task
from turnwise.errors import Party
from turnwise.rollout.group import DroppedGroup
from turnwise.rollout.stats import RolloutStats
from turnwise.training.pool import (
    GroupPlan,
    GroupState,
    LengthBias,
    Pool,
    PoolEntry,
    PoolRules,
    entries_to_rows,
    num_admissible,
    rows_to_entries,
)
from turnwise.trajectory import (
    Branch,
    EndReason,
    Failure,
    Message,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def _plan(number: int) -> GroupPlan:
    return GroupPlan(number=number, task=Task(id=f"task-{number}", data={}), seed=1000 + number)


def _turn(version: int, **fields: object) -> Turn:
    known: dict[str, object] = {
        "prompt_ids": (1, 2),
        "sampled_ids": (3, 4),
        "sampler_logprobs": (-0.1, -1 / 3),
        "policy_version": version,
        "reply": Message(role="assistant", content="hi"),
    }
    return Turn(**{**known, **fields})  # pyright: ignore[reportArgumentType]


def _trajectory(*versions: int) -> Trajectory:
    turns = tuple(_turn(version) for version in versions)
    return Trajectory(task_id="t", attempt=0, seed=1, turns=turns, end_reason=EndReason.TERMINATED)


def _group(*versions: int) -> TrajectoryGroup:
    return TrajectoryGroup(task_id="t", trajectories=(_trajectory(*versions),))


def test_the_capacity_rule_gives_areals_number() -> None:
    # the specification's vector "areal capacity eta2 v3 B4 acc14 run5"
    slots = num_admissible(max_staleness=2, num_trained=3 * 4, batch_size=4, num_accepted=14, num_running=5)
    assert slots == 5


def test_without_lag_one_batch_is_admitted_after_the_other_is_learned() -> None:
    pool = Pool(_plan, PoolRules(batch_size=3, max_batch=3))
    first = pool.admit(num_steps=2)
    assert [entry.plan.number for entry in first] == [0, 1, 2]
    assert pool.admit(num_steps=2) == []
    for entry in first[:2]:
        pool.finish(entry, _group(0))
    assert not pool.is_ready, "the whole batch is waited for"
    pool.finish(first[2], _group(0))
    assert pool.is_ready
    assert pool.take() == first
    assert pool.admit(num_steps=2) == [], "the update is not done"
    pool.learned()
    assert [entry.plan.number for entry in pool.admit(num_steps=2)] == [3, 4, 5]
    assert pool.admit(num_steps=2) == []


def test_nothing_is_played_that_no_update_would_learn_from() -> None:
    pool = Pool(_plan, PoolRules(batch_size=4, max_batch=4, max_staleness=3))
    assert len(pool.admit(num_steps=2)) == 8


class _Run:
    """A run whose groups end in any order; weights are read once per group, when it starts."""

    def __init__(self, *, lag: int, batch: int, steps: int, max_wait: int | None, seed: int) -> None:
        self.pool = Pool(_plan, PoolRules(batch_size=batch, max_batch=batch, max_staleness=lag, max_wait=max_wait))
        self.random = random.Random(seed)
        self.steps = steps
        self.started: dict[int, int] = {}
        self.consumed: list[int] = []
        self.stale: list[int] = []
        self.waits: list[int] = []
        self.staleness: list[int] = []
        self.largest = 0

    def play(self, *, until: int | None = None) -> None:
        pool = self.pool
        while pool.step < (self.steps if until is None else until):
            for entry in pool.admit(self.steps):
                self.started[entry.plan.number] = pool.step
            self.largest = max(self.largest, len(pool.entries))
            while not pool.is_ready:
                playing = [entry for entry in pool.entries.values() if entry.state is not GroupState.DONE]
                entry = self.random.choice(playing)
                pool.finish(entry, _group(self.started[entry.plan.number]))
                self.stale += [entry.plan.number for entry in pool.drop_stale(pool.step)]
                for entry in pool.admit(self.steps):
                    self.started[entry.plan.number] = pool.step
            taken = pool.take()
            self.consumed += [entry.plan.number for entry in taken]
            self.waits += [pool.step - entry.admitted for entry in taken]
            self.staleness += [pool.step - self.started[entry.plan.number] for entry in taken]
            pool.learned()


@settings(max_examples=60, deadline=None)
@given(lag=st.integers(0, 4), batch=st.integers(1, 5), steps=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_in_any_order_of_ends_nothing_is_lost_doubled_starved_or_too_old(
    lag: int, batch: int, steps: int, seed: int
) -> None:
    run = _Run(lag=lag, batch=batch, steps=steps, max_wait=None, seed=seed)
    run.play()
    assert Counter(run.consumed) == Counter(range(batch * steps))
    assert max(run.waits) <= lag
    assert max(run.staleness) <= lag
    assert run.stale == []
    assert run.largest <= (lag + 1) * batch
    assert not run.pool.entries


@settings(max_examples=40, deadline=None)
@given(lag=st.integers(0, 3), steps=st.integers(2, 8), at=st.integers(1, 7), seed=st.integers(0, 10_000))
def test_a_pool_that_goes_on_in_another_process_consumes_every_plan_once_and_does_not_burst(
    lag: int, steps: int, at: int, seed: int
) -> None:
    whole = _Run(lag=lag, batch=3, steps=steps, max_wait=None, seed=seed)
    whole.play(until=min(at, steps))
    rows = entries_to_rows(whole.pool.entries.values())
    again = _Run(lag=lag, batch=3, steps=steps, max_wait=None, seed=seed + 1)
    old = whole.pool
    again.pool = Pool(
        _plan, PoolRules(batch_size=3, max_batch=3, max_staleness=lag), step=old.step, num_dealt=old.num_dealt
    )
    for entry in rows_to_entries(rows, _plan):
        again.pool.restore(entry)
        again.started[entry.plan.number] = whole.started[entry.plan.number] if entry.outcome else old.step
    again.play()
    assert Counter(whole.consumed + again.consumed) == Counter(range(3 * steps))
    assert again.largest <= (lag + 1) * 3
    assert max(again.staleness, default=0) <= lag


def test_a_longer_wait_than_the_lag_drops_whole_groups_that_grew_too_old() -> None:
    run = _Run(lag=1, batch=2, steps=40, max_wait=4, seed=3)
    run.play()
    assert run.stale
    assert max(run.staleness) <= 1
    assert max(run.waits) <= 4
    assert not set(run.stale) & set(run.consumed)


def test_the_oldest_token_decides_how_old_a_group_is() -> None:
    pool = Pool(_plan, PoolRules(batch_size=1, max_batch=1, max_staleness=1))
    (entry, other) = pool.admit(num_steps=9)
    pool.finish(entry, _group(3, 4, 5))
    pool.finish(other, _group(4, 5))
    assert pool.drop_stale(version=5) == [entry]
    assert entry.state is GroupState.DROPPED


def test_an_update_may_start_before_it_is_full() -> None:
    pool = Pool(_plan, PoolRules(batch_size=2, max_batch=4, max_staleness=1))
    entries = pool.admit(num_steps=9)
    assert len(entries) == 4, "so many that each is learned from within the lag, however small the updates are"
    for entry in entries[1:3]:
        pool.finish(entry, _group(0))
    assert pool.is_ready
    assert pool.take() == entries[1:3]


def test_length_bias_is_negative_while_the_long_ones_are_still_played() -> None:
    def entry(drawn: int) -> PoolEntry:
        stats = RolloutStats()
        stats.add_sampled(drawn)
        return PoolEntry(plan=_plan(0), admitted=0, stats=stats)

    bias = LengthBias()
    assert bias.against([5]) is None
    bias.add([entry(10), entry(10)])
    assert bias.against([]) == pytest.approx(0.0)
    assert bias.against([100]) == pytest.approx(10 / 40 - 1)


def test_what_is_done_comes_back_bit_for_bit_and_the_rest_is_queued() -> None:
    call = ToolCall(name="add", arguments={"a": [1, 2]}, id="c1")
    rich = _turn(
        2,
        reply=Message(role="assistant", content="é", tool_calls=(call,)),
        observation=(Message(role="tool", content="3", name="add"),),
        reward_parts={"outcome": 0.1, "shaping": -1e-17},
        env_state="s",
        potential=0.3,
        next_potential=0.2,
        is_trained=False,
    )
    trajectory = Trajectory(
        task_id="t",
        attempt=1,
        seed=5,
        start=(Message(role="user", content="?"),),
        turns=(rich,),
        end_reason=EndReason.MAX_TURNS,
        is_success=False,
        metrics={"steps": 3.0},
        duration_s=0.123456789,
        branch=Branch(turn=0, seed=3),
    )
    failure = Failure(party=Party.ENV, detail="gone")
    failed = Trajectory(task_id="t", attempt=2, seed=6, turns=(), end_reason=EndReason.FAILED, failure=failure)
    group = TrajectoryGroup(
        task_id="t", trajectories=(trajectory,), failed=(failed,), branch_turn=1, branch_probability=0.25
    )
    stats = RolloutStats()
    stats.add_kept_group([trajectory], [failed])
    stats.add_sampled(7)
    stats.add_wait(Party.ENV, 0.1)
    dropped = DroppedGroup(task_id="u", why="group_too_small", detail="1 left", failed=(failed,))
    entries = [
        PoolEntry(plan=_plan(3), admitted=1, state=GroupState.DONE, outcome=group, stats=stats),
        PoolEntry(plan=_plan(4), admitted=2, state=GroupState.DONE, outcome=dropped),
        PoolEntry(plan=_plan(5), admitted=2, state=GroupState.RUNNING, num_playing=2),
    ]
    done, gone, queued = rows_to_entries(entries_to_rows(entries), _plan)
    assert done.outcome == group
    assert done.stats.metrics() == stats.metrics()
    assert gone.outcome == dropped
    assert (queued.state, queued.plan, queued.admitted, queued.num_playing) == (GroupState.QUEUED, _plan(5), 2, 0)
