"""A critic is judged by the states that it learns: those of all tokens, or with `gae=turn` the starts of turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from attempts import rewarded
from turnwise.config.critic import CriticConfig
from turnwise.credit.gae import Gae
from turnwise.credit.values import TrajectoryValues, Values, value_sequences
from turnwise.training.critic import Critic
from turnwise.training.scale import CriticJudge
from turnwise.trajectory import Trajectory
from turnwise.types import AdamParams, Datum

BY_TURN, BY_TOKEN = Gae(level="turn"), Gae()


class KnowsTurns(Critic):
    """Says the return at the start of each turn, and anything at its other tokens."""

    def __init__(self, gae: Gae) -> None:
        nothing = cast(Any, None)
        super().__init__(nothing, CriticConfig(), gae, AdamParams(), nothing, max_tokens=100)

    async def values(self, trajectories: Sequence[Trajectory]) -> Values:
        found: list[TrajectoryValues] = []
        for one in trajectories:
            to_go = np.cumsum([turn.reward for turn in one.turns][::-1])[::-1]
            found.append(TrajectoryValues(turns=tuple(np.array([due, 40.0]) for due in to_go)))
        return found


def test_errors_on_held_out_attempts_are_those_of_states_that_the_critic_learns() -> None:
    attempts = [rewarded([0.1 * turn * (number % 2) for turn in range(5)]) for number in range(4)]
    errors = {
        gae.level: asyncio.run(KnowsTurns(gae).held_out_errors(attempts))["eval/critic_error_2"]
        for gae in (BY_TURN, BY_TOKEN)
    }
    assert errors["turn"] == 0
    assert errors["token"] > 10


def test_a_critic_that_learns_the_starts_of_turns_picks_by_the_start_of_the_last_one() -> None:
    attempt = rewarded([0.0, 1.0])
    last = value_sequences(attempt)[-1].turns[-1]

    class Service:
        """Its critic says the position."""

        def create_training_client_from_state(self, path: str) -> Any:
            def forward(data: Sequence[Datum], loss: str) -> Any:
                assert (path, loss) == ("critic", "value")
                lengths = [len(one.model_input.to_ints()) for one in data]
                outputs = [{"values": np.arange(length, dtype=float)} for length in lengths]
                return SimpleNamespace(result=lambda: SimpleNamespace(loss_fn_outputs=outputs))

            return SimpleNamespace(forward=forward)

    policy = cast(Any, SimpleNamespace(service=Service()))
    by_token = CriticJudge(path="critic", gae=BY_TOKEN)
    assert last.stop - last.start == 2
    assert by_token.score([attempt], policy) == [last.stop - 1]
    assert replace(by_token, gae=BY_TURN).score([attempt], policy) == [last.start]
