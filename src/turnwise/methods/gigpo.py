"""GiGPO: compare attempts as wholes, and turns that were taken in the same state (arXiv:2505.10978).

    A_jk = (R_j - mean of the group) + omega * (G_jk - mean over the turns of the group from the same state)

G_jk is the discounted reward from turn k on. The env names its states (`state_key()`). The name must contain everything
that matters for the future, but not the chat history, with which no state would ever repeat. A state that occurs once
adds nothing. The baseline of whole attempts counts each attempt once, however many turns it has.

R_j is not discounted, G_jk is. So potentials (`reward.potential`) have the discount in G_jk and none in R_j. Both
comparisons then cancel them: what is left is Phi of the state in which all compared turns, or attempts, began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from turnwise.credit.advantages import center_by_group, reward_to_go, step_advantages
from turnwise.credit.shaping import undiscounted_return
from turnwise.credit.weights import Weighting, token_mean
from turnwise.errors import ConfigError
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
from turnwise.methods.grpo import Compared, Comparison
from turnwise.methods.options import FreeLoss, Weighed
from turnwise.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Gigpo:
    """Group-in-group advantages."""

    class Options(Compared, FreeLoss, Weighed):
        """GiGPO: compare attempts, and turns that were taken in the same state."""

        name: str = "gigpo"
        gamma: float = Field(default=0.95, gt=0, le=1, description="Discount per turn, never per token.")
        omega: float = Field(default=1.0, ge=0, description="Weight of the step advantage.")

        def why_discount_unread(self) -> str | None:
            is_changed = self.gamma != type(self).model_fields["gamma"].default
            if self.omega == 0 and is_changed:
                return "while method.omega is 0: whole attempts are not discounted"
            return None

        def build(self, setup: MethodSetup) -> Gigpo:
            return Gigpo(
                loss_fn=self.loss,
                loss_config=self.loss_config,
                compare=self.compare,
                weigh=self.weighting(setup),
                gamma=self.gamma,
                omega=self.omega,
                potential_weight=setup.potential_weight,
            )

    loss_fn: str
    loss_config: Mapping[str, float | str]
    compare: Comparison = center_by_group
    weigh: Weighting = token_mean
    gamma: float = 0.95
    omega: float = 1.0
    potential_weight: float = 0.0
    """Weight of the potentials in the rewards, which are discounted by `gamma`; 0 if the rewards contain none."""
    source: PlayGroups = PLAY_GROUPS
    needs_values: bool = False

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        return keep_by(lambda group: why_no_signal(group, self.advantages), groups)

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:  # noqa: ARG002
        return make_lessons(credit_groups(groups, self.advantages), self.weigh)

    def advantages(self, group: TrajectoryGroup) -> list[NDArray[np.float64]]:
        """[K] per attempt: one number per turn."""
        returns = [reward_to_go([t.reward for t in one.turns], discount=self.gamma) for one in group.trajectories]
        steps = step_advantages(returns, [_anchors(one) for one in group.trajectories], self.compare)
        wholes_G = self.compare(
            [undiscounted_return(t, gamma=self.gamma, weight=self.potential_weight) for t in group.trajectories]
        )
        return [whole + self.omega * step_K for whole, step_K in zip(wholes_G, steps, strict=True)]


def _anchors(trajectory: Trajectory) -> list[str]:
    keys = [turn.env_state for turn in trajectory.turns if turn.env_state is not None]
    if len(keys) != len(trajectory.turns):
        raise ConfigError(
            "gigpo compares turns that were taken in the same state, and this world's env does not name its states; "
            "give it a method state_key() -> str, or use method=grpo"
        )
    return keys
