"""How long an attempt may go on, in turns, tokens and seconds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from turnwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """The first three end an attempt with a `EndReason`; so does `attempt_deadline_s`. The other deadlines fail it."""

    max_turns: int = 8
    max_tokens_per_turn: int = 256
    """Sampled tokens of one reply."""
    max_trajectory_tokens: int = 4096
    """Prompt and reply together, at any turn; no more than the model's context."""
    attempt_deadline_s: float = 600.0
    """The whole attempt, from making the env on. What was played until then counts, with `EndReason.TIME_LIMIT`."""
    step_deadline_s: float = 60.0
    """One call of the env."""
    sample_deadline_s: float = 300.0
    """One call of the sampler, the wait for its turn included."""
    close_deadline_s: float = 10.0
    """Closing the env; also how long it may take beyond the attempt's deadline."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens_per_turn"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")
        if self.max_trajectory_tokens < 2:
            raise ConfigError(
                f"max_trajectory_tokens={self.max_trajectory_tokens}; expected room for a prompt and a reply"
            )
        for name in ("attempt_deadline_s", "step_deadline_s", "sample_deadline_s", "close_deadline_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value}; expected a finite number of seconds above 0")

    def num_tokens_left(self, num_prompt_tokens: int) -> int:
        """How many tokens may be sampled after a prompt; 0 or less when it already fills the budget."""
        return min(self.max_tokens_per_turn, self.max_trajectory_tokens - num_prompt_tokens)


class Clock:
    """The time of one attempt."""

    def __init__(self, deadline_s: float) -> None:
        self._started_s = time.monotonic()
        self._deadline_s = deadline_s

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def is_over(self) -> bool:
        return self.spent_s >= self._deadline_s

    def at_most(self, deadline_s: float) -> float:
        """A call's own deadline, or what is left of the attempt's."""
        return max(0.0, min(deadline_s, self._deadline_s - self.spent_s))
