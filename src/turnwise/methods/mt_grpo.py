"""MT-GRPO: normalise outcomes and turn rewards separately, each inside the group (arXiv:2505.11821).

    A_last = A_outcome        A_k = A_outcome + c * A_turn_k

The reward of an attempt's last turn is its outcome; the rewards before belong to their turns, and are compared with
those of the same turn in the other attempts. So it fits worlds whose k-th turns are alike, such as "call the tool, then
answer"; where attempts differ in length, `grpo` with `credit: reward_to_go` has fewer assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from turnwise.credit.advantages import outcome_plus_turn
from turnwise.credit.weights import Weighting, token_mean
from turnwise.methods.base import (
    PLAY_GROUPS,
    Kept,
    Lesson,
    MethodSetup,
    PlayGroups,
    Values,
    credit_groups,
    keep_by,
    make_lessons,
    why_no_signal,
)
from turnwise.methods.options import FreeLoss, Weighed
from turnwise.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MtGrpo:
    """The sum of outcome and turn advantages."""

    class Options(FreeLoss, Weighed):
        """MT-GRPO: normalise outcomes and rewards of turns separately."""

        name: str = "mt_grpo"
        turn_coef: float = Field(default=1.0, ge=0, description="Weight of the turn's own reward.")

        def build(self, setup: MethodSetup) -> MtGrpo:
            return MtGrpo(
                loss_fn=self.loss,
                loss_config=self.loss_config,
                weigh=self.weighting(setup),
                turn_coef=self.turn_coef,
            )

        def why_not_potential(self) -> str | None:
            return (
                "takes the reward of the last turn for the outcome: with potentials that is r - phi(s_last), and every "
                "turn would pay for a good state before the end"
            )

    loss_fn: str
    loss_config: Mapping[str, float | str]
    weigh: Weighting = token_mean
    turn_coef: float = 1.0
    source: PlayGroups = PLAY_GROUPS
    needs_values: bool = False

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        return keep_by(lambda group: why_no_signal(group, self.advantages), groups)

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:  # noqa: ARG002
        return make_lessons(credit_groups(groups, self.advantages), self.weigh)

    def advantages(self, group: TrajectoryGroup) -> list[NDArray[np.float64]]:
        """[K] per attempt: one number per turn."""
        rewards = [[turn.reward for turn in trajectory.turns] for trajectory in group.trajectories]
        return outcome_plus_turn(rewards, coefficient=self.turn_coef)
