"""What a rollout can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from turnwise.errors import ConfigError
from turnwise.rollout.limits import RolloutLimits

UnparsablePolicy = Literal["penalise", "mask", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How groups of attempts are played."""

    limits: RolloutLimits = field(default_factory=RolloutLimits)
    group_size: int = 8
    """Attempts per task."""
    min_group_size: int = 2
    """A group with fewer attempts left is dropped; 1 for evaluation, where nothing is centred."""
    max_retries: int = 2
    """How often a failed attempt is played again, in a fresh env; the sampler draws anew."""
    same_start: bool = True
    """The attempts of a group start in the same world: one env seed for all, so that they differ by what the policy
    says. Else each try draws a world of its own, as an evaluation does, where nothing is compared."""
    max_concurrency: int = 64
    """Attempts under way at once, over all groups."""
    temperature: float = 1.0
    """Of sampling; 0 is greedy. There is no top-p or top-k: the loss needs the whole distribution."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply, besides the format's own end of turn."""
    on_unparsable: UnparsablePolicy = "penalise"
    """What an unreadable reply costs: a penalty, its place in the loss, or the rest of the attempt."""
    unparsable_penalty: float = 0.0
    """Taken off the reward by `penalise`; 0 lets the env's own reward stand."""
    quarantine_task_after: int = 2
    """Groups of one task, in a row, that end without a single attempt left; the task is not played again."""
    quarantine_world_after: int = 200
    """Tries in a row, over all tasks, that the env or a tool failed; nothing is played any more."""

    def __post_init__(self) -> None:
        for name in ("group_size", "min_group_size", "max_concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")
        for name in ("quarantine_task_after", "quarantine_world_after"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries={self.max_retries}; expected 0 (never) or more")
        if self.min_group_size > self.group_size:
            raise ConfigError(
                f"min_group_size={self.min_group_size} is more than group_size={self.group_size}; "
                "every group would be dropped"
            )
        if not 0 <= self.temperature <= 100:
            raise ConfigError(f"temperature={self.temperature}; expected 0 (greedy) to 100")
        if not (math.isfinite(self.unparsable_penalty) and self.unparsable_penalty >= 0):
            raise ConfigError(f"unparsable_penalty={self.unparsable_penalty}; expected 0 or more, it is subtracted")
        if self.unparsable_penalty and self.on_unparsable != "penalise":
            raise ConfigError(
                f"unparsable_penalty={self.unparsable_penalty} is not read with on_unparsable={self.on_unparsable!r}"
            )

    @property
    def logprob_temperature(self) -> float:
        """The temperature that sampled logprobs are at: a greedy sampler gives them at 1."""
        return self.temperature or 1.0
