"""Stop strings, found in the decoded tail of what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

SLACK_TOKENS = 8
"""Tokens beyond the stop's length in characters: bytes of one character may be spread over several tokens."""


class StopFinder:
    """Decodes with the model's own tokenizer, which is loaded when the first stop string asks for it."""

    def __init__(self, tokenizer_dir: Path) -> None:
        self.tokenizer_dir = tokenizer_dir

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer_dir)

    def ends_with_stop(self, sampled: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the newest token completed one of `stops`."""
        if not stops:
            return False
        window = max(len(stop) for stop in stops) + SLACK_TOKENS
        text = self.tokenizer.decode(sampled[-window:])
        return any(stop in text for stop in stops)
