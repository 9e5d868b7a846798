"""PPO with a critic (arXiv:1707.06347, with VAPO's additions, arXiv:2504.05118): a learned value is the baseline.

    A    = GAE of the policy's lambda over tokens, turns or both      (credit/gae.py)
    R    = GAE of the critic's lambda + V                             what the critic learns; lambda 1: plain returns
    loss = -min(r A, clip(r, 0.8, 1.28) A), and at most 3 |A| where A < 0

Attempts are not compared inside a group, so a group whose rewards are all the same still teaches, and so does a group
of one. `calibrate` corrects the critic's values by the other attempts of the batch (`credit/calibrate.py`): the error
of a critic that is wrong by about the same everywhere would drown what the actions were worth. `whiten` scales the
advantages of an optimizer step to mean 0 and deviation 1 over its trained tokens, in a mix those of each world by
themselves. The critic is trained by the loop (`training/critic.py`), towards the returns that the lessons carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from turnwise.credit.calibrate import calibrate_by_world
from turnwise.credit.gae import Gae, Level, whiten_by_world
from turnwise.credit.weights import Weighting, token_mean
from turnwise.errors import DataError
from turnwise.losses.table import Settings
from turnwise.methods.base import (
    PLAY_GROUPS,
    Credited,
    Kept,
    Lesson,
    MethodSetup,
    PlayGroups,
    Values,
    keep_by,
    make_lessons,
    why_unusable,
)
from turnwise.methods.options import FreeLoss, Weighed
from turnwise.trajectory import TrajectoryGroup

PPO_LOSS: Settings = {"clip_high_threshold": 1.28, "dual_clip": 3.0}
"""This method's settings of the loss `ppo` that differ from the loss's defaults: clip-higher, and the dual clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo:
    """Advantages over a critic's values; only groups with nothing to train are dropped."""

    class Options(FreeLoss, Weighed):
        """PPO: advantages over the values of a critic."""

        name: str = "ppo"
        loss_fn: str = Field(default="ppo", description=FreeLoss.model_fields["loss_fn"].description)
        gae: Level = Field(
            default="token",
            description="What one step of the advantage's recursion is: a token or a turn; bilevel takes turns "
            "first, then tokens.",
        )
        gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per turn, never per token.")
        policy_lambda: float | Literal["adaptive"] = Field(
            default="adaptive",
            description="Lambda of the policy's advantages, 0 to 1; `adaptive` follows the length of the attempt.",
        )
        alpha: float = Field(
            default=1.5, gt=0, description="Reach of the adaptive lambda as a share of the attempt; VAPO uses 0.05."
        )
        critic_lambda: float = Field(
            default=1.0, ge=0, le=1, description="Lambda of the critic's targets; 1 is plain returns."
        )
        whiten: bool = Field(default=False, description="Scale a step's advantages to mean 0 and deviation 1.")
        calibrate: bool = Field(
            default=False,
            description="Correct the critic's values by a line that is fitted to the other attempts of the batch.",
        )
        positive_nll: float = Field(
            default=0.0,
            ge=0,
            description="Weight of the mean negative log-likelihood of the step's successful attempts, which is added "
            "to the loss; VAPO uses 0.1.",
        )

        default_loss = "ppo"
        loss_defaults: ClassVar[dict[str, Settings]] = {"ppo": PPO_LOSS}
        needs_critic = True

        @property
        def learns_from_one(self) -> bool:
            return True

        @property
        def imitation_coef(self) -> float:
            return self.positive_nll

        def build(self, setup: MethodSetup) -> Ppo:
            return Ppo(
                loss_fn=self.loss,
                loss_config=self.loss_config,
                gae=self.make_gae(),
                is_whitened=self.whiten,
                is_calibrated=self.calibrate,
                weigh=self.weighting(setup),
            )

        def make_gae(self) -> Gae:
            is_adaptive = self.policy_lambda == "adaptive"
            return Gae(
                level=self.gae,
                gamma=self.gamma,
                policy_lambda=None if is_adaptive else float(self.policy_lambda),
                alpha=self.alpha,
                critic_lambda=self.critic_lambda,
            )

        @model_validator(mode="after")
        def _lambda_fits(self) -> Self:
            if isinstance(self.policy_lambda, float):
                if not 0 <= self.policy_lambda <= 1:
                    raise ValueError(f"policy_lambda={self.policy_lambda}; expected 0 to 1, or adaptive")
                if self.alpha != type(self).model_fields["alpha"].default:
                    raise ValueError(f"alpha is not read by policy_lambda={self.policy_lambda}; leave one of them out")
            return self

    loss_fn: str
    loss_config: Mapping[str, float | str]
    gae: Gae
    is_whitened: bool = False
    is_calibrated: bool = False
    weigh: Weighting = token_mean
    source: PlayGroups = PLAY_GROUPS
    needs_values: bool = True

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        return keep_by(lambda group: why_unusable(group, min_size=1), groups)

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if values is None or len(values) != len(trajectories):
            came = "none" if values is None else str(len(values))
            raise DataError(f"{came} values for {len(trajectories)} trajectories; PPO needs a critic's values of each")
        found = [self.gae.credit(one, known) for one, known in zip(trajectories, values, strict=True)]
        if self.is_calibrated:  # for the policy alone: the critic learns what came, and is clipped around what it said
            better = calibrate_by_world(values, trajectories, self.gae)
            advantages = [
                self.gae.credit(one, known).advantages for one, known in zip(trajectories, better, strict=True)
            ]
        else:
            advantages = [credit.advantages for credit in found]
        if not any(turn_S.any() for attempt in advantages for turn_S in attempt):
            return []  # everything went exactly as the critic predicted
        if self.is_whitened:
            advantages = whiten_by_world(advantages, trajectories)
        rest = iter(zip(trajectories, advantages, strict=True))
        credited: list[list[Credited]] = [[next(rest) for _ in group.trajectories] for group in groups]
        lessons = make_lessons(credited, self.weigh)
        return [
            replace(lesson, returns=credit.returns, values=known)
            for lesson, credit, known in zip(lessons, found, values, strict=True)
        ]
