"""Time that runs out while an attempt waits for its opponent is the opponent's, whichever time it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from turnwise.envs.base import Task
from turnwise.envs.game import Game
from turnwise.envs.library.negotiate import NegotiateGame
from turnwise.envs.library.negotiate_games import Issue, PayoffTable
from turnwise.envs.rewarded import RewardedEnv
from turnwise.envs.seats import SeatedEnv
from turnwise.errors import Party
from turnwise.renderers.base import Renderer
from turnwise.trajectory import EndReason, Message
from unit.rollout.worlds import play_env, saying

pytestmark = pytest.mark.usefixtures("no_leaks")
ISSUE = Issue(name="rent", options=("900", "1,000"), kind="distributive", points=((0, 2), (2, 0)))


class Tiring:
    """An opponent that answers so many times, and then no more."""

    name, is_scripted = "tiring", False

    def __init__(self, num_replies: int) -> None:
        self.num_left = num_replies

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002 - it does not look
        self.num_left -= 1
        if self.num_left < 0:
            await asyncio.sleep(60)
        return "Well."


def game(first: int = 0) -> NegotiateGame:
    return NegotiateGame(PayoffTable(issues=(ISSUE,)), ("landlord", "tenant"), first=first)


CASES: list[tuple[int, int, dict[str, Any], bool]] = [
    (1, 0, {"attempt_deadline_s": 2.0}, False),  # in the second turn, where others only cut the attempt short
    (1, 0, {"attempt_deadline_s": 2.0}, True),
    (0, 0, {"attempt_deadline_s": 0.3}, False),
    (0, 1, {"attempt_deadline_s": 0.3}, False),  # it has to begin
    (1, 0, {"step_deadline_s": 0.3}, True),
]


async def test_an_attempt_whose_time_ends_while_it_waits_for_the_opponent_fails_by_it(renderer: Renderer) -> None:
    for case in CASES:
        num_replies, first, limits, is_wrapped = case
        seated = SeatedEnv(game(first), 0, Tiring(num_replies), 0)
        env = RewardedEnv(seated, Task(id="t"), lambda task, messages: 1.0) if is_wrapped else seated  # noqa: ARG005
        trajectory = await play_env(env, renderer, saying(renderer, "Hello."), **limits)
        assert trajectory.end_reason is EndReason.FAILED, case
        assert trajectory.failure is not None
        assert trajectory.failure.party is Party.OPPONENT, case
        assert "still waited for the opponent" in trajectory.failure.detail
        assert len(trajectory.turns) == num_replies, case
