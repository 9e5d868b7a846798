"""The section `memory` of a run's config."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from turnwise.runtime.section import Section


class MemoryConfig(Section):
    """What the policy remembers of a long attempt; without these options, every prompt holds all turns."""

    window: int = Field(
        default=0,
        ge=0,
        description="Past turns that a prompt holds in full; 0: all of them. Without summaries, the oldest turn is "
        "left out when another one comes.",
    )
    summary_tokens: int = Field(
        default=0,
        ge=0,
        description="When the window is full, the policy writes a summary of at most this many tokens, and the turns "
        "leave the prompt; 0: no summaries.",
    )
    keep: int = Field(
        default=0, ge=0, description="How many of the last turns stay in full after a summary; fewer than the window."
    )
    notes: bool = Field(
        default=False,
        description="Give the policy two tools, write_note and recall_note. Notes are kept outside the prompt.",
    )

    @property
    def is_on(self) -> bool:
        return bool(self.window or self.notes)

    def most_sampled_tokens(self, *, max_turns: int, max_tokens: int, max_context: int) -> int:
        """The most tokens that an attempt can sample; with a window, an attempt may be longer than the context."""
        sampled = max_turns * max(max_tokens, self.summary_tokens)
        return sampled if self.window else min(sampled, max_context)

    @model_validator(mode="after")
    def _options_fit_together(self) -> Self:
        if self.summary_tokens and not self.window:
            raise ValueError(
                f"summary_tokens={self.summary_tokens} is not read without a window: a summary is written when the "
                "window is full; set window too"
            )
        if self.keep and not self.summary_tokens:
            raise ValueError(f"keep={self.keep} is not read without summaries; set summary_tokens, or leave it out")
        if self.keep and self.keep >= self.window:
            raise ValueError(f"keep={self.keep} and window={self.window}: nothing would leave a full window")
        return self


NO_MEMORY = MemoryConfig()
