"""PPO with a critic (arXiv:1707.06347, with VAPO's additions, arXiv:2504.05118): a learned value is the baseline.

    A    = GAE of the policy's lambda over tokens, turns or both      (credit/gae.py)
    R    = GAE of the critic's lambda + V                             what the critic learns; lambda 1: plain returns
    loss = -min(r A, clip(r, 0.8, 1.28) A), and at most 3 |A| where A < 0

No attempt is compared with another, so a group whose rewards are all the same still teaches, and so does a group of
one. `whiten` scales the advantages of an optimizer step to mean 0 and deviation 1 over its trained tokens. The critic
is trained by the loop (`training/critic.py`), towards the returns that the lessons carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from turnwise.credit.gae import Gae, whiten
from turnwise.credit.weights import Weighting, token_mean, weighting
from turnwise.errors import DataError
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
from turnwise.methods.config import MethodConfig
from turnwise.trajectory import TrajectoryGroup

PPO_LOSS: Mapping[str, float] = {"clip_high_threshold": 1.28, "dual_clip": 3.0}
"""Where this method's loss differs from the loss `ppo` by itself: clip-higher, and the dual clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo:
    """Advantages over a critic's values; only groups with nothing to train are dropped."""

    loss_fn: str
    loss_config: Mapping[str, float | str]
    gae: Gae
    is_whitened: bool = False
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
        advantages = [credit.advantages for credit in found]
        if not any(turn_S.any() for attempt in advantages for turn_S in attempt):
            return []  # everything went exactly as the critic said it would
        if self.is_whitened:
            advantages = whiten(advantages, [[turn.is_trained for turn in one.turns] for one in trajectories])
        rest = iter(zip(trajectories, advantages, strict=True))
        credited: list[list[Credited]] = [[next(rest) for _ in group.trajectories] for group in groups]
        lessons = make_lessons(credited, self.weigh)
        return [
            replace(lesson, returns=credit.returns, values=known)
            for lesson, credit, known in zip(lessons, found, values, strict=True)
        ]


def make_gae(config: MethodConfig) -> Gae:
    """How a method with a critic estimates; the critic learns its returns."""
    chosen = config.chosen("policy_lambda")
    return Gae(
        level=config.chosen("gae"),
        gamma=config.chosen("gamma"),
        policy_lambda=None if chosen == "adaptive" else float(chosen),
        alpha=config.chosen("alpha"),
        critic_lambda=config.chosen("critic_lambda"),
    )


def make_ppo(setup: MethodSetup) -> Ppo:
    config = setup.config
    own = PPO_LOSS if config.loss == "ppo" else {}
    return Ppo(
        loss_fn=config.loss,
        loss_config={**own, **config.loss_config},
        gae=make_gae(config),
        is_whitened=config.chosen("whiten"),
        weigh=weighting(config.chosen("normalisation"), max_tokens=setup.max_tokens),
    )
