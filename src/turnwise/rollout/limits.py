"""How long an attempt may go on, in turns, tokens and seconds."""

from __future__ import annotations

import time

from pydantic import Field, field_validator

from turnwise.runtime.section import Section


class RolloutLimits(Section):
    """Bounds on one attempt. 0 stands for a bound that the world or the model has (`RolloutConfig.for_world`).

    The first three end an attempt with an `EndReason`, and so does `attempt_deadline_s`. An attempt that misses one of
    the other deadlines has failed.
    """

    max_turns: int = Field(default=0, ge=0, description="Most replies in one attempt; 0 takes the world's own limit.")
    max_tokens_per_turn: int = Field(
        default=0, ge=0, description="Most sampled tokens in one reply; 0 takes the world's own limit."
    )
    max_trajectory_tokens: int = Field(
        default=0, ge=0, description="Most tokens in one attempt, including prompts; 0 takes the model's context."
    )
    attempt_deadline_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds for a whole attempt, including making the env; then it is cut short, and the "
        "played turns count.",
    )
    step_deadline_s: float = Field(
        default=60.0, gt=0, description="Seconds for one call of the env; then the attempt fails."
    )
    sample_deadline_s: float = Field(
        default=300.0, gt=0, description="Seconds for one reply, including the wait; then the attempt fails."
    )
    close_deadline_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds for closing the env, also after the attempt's deadline.",
    )

    @field_validator("max_trajectory_tokens")
    @classmethod
    def _holds_a_prompt_and_a_reply(cls, count: int) -> int:
        if count == 1:
            raise ValueError("1 is no room for a prompt and a reply; expected 2 or more, or 0")
        return count

    def num_tokens_left(self, num_prompt_tokens: int, env_limit: int = 0) -> int:
        """How many tokens may be sampled after a prompt; 0 or less when it already fills the budget.

        Args:
            env_limit: What the env allows this reply (`EnvStep.max_tokens`); 0: as many as the run does.
        """
        limit = env_limit or self.max_tokens_per_turn
        return min(limit, self.max_trajectory_tokens - num_prompt_tokens)


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
        """The call's own deadline, or the rest of the attempt's time if that is less."""
        return max(0.0, min(deadline_s, self._deadline_s - self.spent_s))
