"""What a run says before its first step, and when it stops there."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.envs.base import assistant, user
from turnwise.errors import Party
from turnwise.renderers.base import Renderer
from turnwise.rollout.group import DroppedGroup, RolloutResult
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.stats import FirstFailures, RolloutStats
from turnwise.training.preflight import AllFailedError, check_any_left, check_demonstrations, check_earnings
from turnwise.trajectory import EndReason, Failure, Message, Trajectory, TrajectoryGroup, Turn


class Shown:
    """A world with one demonstration."""

    name, max_turns, max_tokens = "shown", 2, 8

    def __init__(self, *replies: str) -> None:
        self._dialogue = [part for reply in replies for part in (user("Go on."), assistant(reply))]

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:  # noqa: ARG002
        return [self._dialogue] if self._dialogue else []


def _limits(**fields: int) -> RolloutLimits:
    return RolloutLimits(**{"max_turns": 2, "max_tokens_per_turn": 8, "max_trajectory_tokens": 400, **fields})  # type: ignore[arg-type]


def _played(*rewards: float, failed: tuple[Party, ...] = ()) -> RolloutResult:
    def attempt(index: int, reward: float, party: Party | None = None) -> Trajectory:
        turn = Turn(
            prompt_ids=(1,),
            sampled_ids=(2,),
            sampler_logprobs=(-1.0,),
            policy_version=0,
            reply=assistant("no"),
            reward_parts={"outcome": reward},
        )
        failure = None if party is None else Failure(party=party, detail="step: it broke", traceback="File x, line 3")
        end = EndReason.TERMINATED if party is None else EndReason.FAILED
        return Trajectory(task_id="t", attempt=index, seed=0, turns=(turn,), end_reason=end, failure=failure)

    good = tuple(attempt(index, reward) for index, reward in enumerate(rewards))
    bad = tuple(attempt(index, 0.0, party) for index, party in enumerate(failed))
    groups = (TrajectoryGroup(task_id="t", trajectories=good),) if good else ()
    dropped = (DroppedGroup(task_id="t", why="group_too_small", detail="", trajectories=(), failed=bad),) if bad else ()
    return RolloutResult(groups=groups, dropped=dropped, stats=RolloutStats())


def test_demonstrations_that_do_not_fit_are_told_with_the_limit_that_fits(renderer: Renderer) -> None:
    world: Any = Shown("one two three four five six seven eight nine ten eleven twelve")
    finding = check_demonstrations(world, renderer, _limits(), seed=0)
    assert finding is not None
    assert finding.name == "demonstrations_cut"
    longest = int(finding.numbers["longest"])
    assert finding.fixes[0].option == f"rollout.max_tokens_per_turn={longest}"
    assert check_demonstrations(world, renderer, _limits(max_tokens_per_turn=longest), seed=0) is None


def test_demonstrations_with_more_turns_than_an_attempt_are_told(renderer: Renderer) -> None:
    world: Any = Shown("a", "b", "c")
    finding = check_demonstrations(world, renderer, _limits(), seed=0)
    assert finding is not None
    assert [fix.option for fix in finding.fixes] == ["rollout.max_turns=3"]
    empty: Any = Shown()
    assert check_demonstrations(empty, renderer, _limits(), seed=0) is None


def test_a_world_in_which_nothing_is_earned_is_told_from_one_with_a_broken_reward() -> None:
    nothing, broken = check_earnings(_played(*[0.0] * 8)), check_earnings(_played(*[0.0] * 8), [0.0, 0.0])
    assert nothing is not None
    assert broken is not None
    assert (nothing.name, broken.name) == ("nothing_earned", "reward_broken")
    for earned in (_played(*[0.0] * 7, 1.0), _played(*[0.0] * 7)):
        assert check_earnings(earned) is None


def test_after_a_warm_up_that_earned_nothing_a_longer_one_is_advised() -> None:
    finding = check_earnings(_played(*[0.0] * 8), warmup_steps=600)
    assert finding is not None
    assert finding.fixes[0].option == "warmup.steps=2400"
    assert "after the warm-up" in finding.seen


def test_a_run_goes_on_if_one_attempt_is_left_or_the_sampler_may_come_back() -> None:
    with pytest.raises(AllFailedError, match=r"all 2 attempts of the first step failed, the first by env(.|\n)*line 3"):
        check_any_left(_played(failed=(Party.ENV, Party.ENV)), "the first step", FirstFailures())
    check_any_left(_played(1.0, failed=(Party.ENV,)), "the first step", FirstFailures())
    check_any_left(_played(failed=(Party.SAMPLER, Party.SAMPLER)), "the first step", FirstFailures())
