"""What a task brings to `run_grpo`: a dataset, a prompt and a reward. The loop brings everything else.

Whatever an adapter does wrong becomes an `AdapterError` that names the sample. A reward is never made up in its place:
a verifier that crashed has not found an answer wrong.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, SupportsFloat, TypeGuard, TypeVar, cast

from turnwise.errors import AdapterError

SampleT = TypeVar("SampleT")
T = TypeVar("T")

_SHOWN_CHARACTERS = 200


class RLAdapter(ABC, Generic[SampleT]):
    """A single-turn task: one prompt, one response, one reward.

    >>> class Shouting(RLAdapter[str]):
    ...     def build_dataset(self) -> list[str]:
    ...         return ["hello", "good morning"]
    ...     def make_prompt(self, sample: str, tokenizer: Any) -> list[int]:
    ...         return tokenizer.encode(f"Say it loud: {sample}\\n")
    ...     def compute_reward(self, response_text: str, sample: str) -> float:
    ...         return float(response_text.isupper())
    """

    @abstractmethod
    def build_dataset(self) -> list[SampleT]:
        """The samples to train on, in any order; called once."""

    @abstractmethod
    def make_prompt(self, sample: SampleT, tokenizer: Any) -> list[int]:
        """The token ids that the model continues; at least one."""

    @abstractmethod
    def compute_reward(self, response_text: str, sample: SampleT) -> float:
        """How good a response is, as a finite number. The text comes without special tokens such as the stop token."""

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Called after each step with the rewards of all its responses, for a task's own bookkeeping."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """An adapter's samples, and the adapter's answers about them, checked."""

    adapter: RLAdapter[Any]
    samples: Sequence[Any]

    @classmethod
    def build(cls, adapter: RLAdapter[Any]) -> Dataset:
        samples = list(adapter.build_dataset())
        if not samples:
            raise AdapterError(f"{type(adapter).__name__}.build_dataset returned no samples; expected at least one")
        return cls(adapter, samples)

    def prompt(self, index: int, tokenizer: Any) -> list[int]:
        """The prompt of one sample."""
        sample = self.samples[index]
        ids = cast(object, self._ask(index, "make_prompt", lambda: self.adapter.make_prompt(sample, tokenizer)))
        if not _is_token_ids(ids):
            raise AdapterError(
                f"{self._at(index, 'make_prompt')} returned {_short(ids)}; expected a list of token ids, at least one"
            )
        return ids

    def reward(self, index: int, response_text: str) -> float:
        """The reward of one response, a finite float."""
        sample = self.samples[index]
        reward: Any = self._ask(index, "compute_reward", lambda: self.adapter.compute_reward(response_text, sample))
        value = float(reward) if isinstance(reward, SupportsFloat) else math.nan
        if not math.isfinite(value):
            raise AdapterError(
                f"{self._at(index, 'compute_reward')} returned {_short(reward)} for the response "
                f"{_short(response_text)}; expected a finite number"
            )
        return value

    def _ask(self, index: int, method: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except Exception as cause:
            raise AdapterError(f"{self._at(index, method)} raised {cause!r}") from cause

    def _at(self, index: int, method: str) -> str:
        return f"{type(self.adapter).__name__}.{method} on sample {index}, {_short(self.samples[index])},"


def _is_token_ids(value: object) -> TypeGuard[list[int]]:
    tokens = cast(list[object], value) if isinstance(value, list) else []
    return len(tokens) > 0 and all(isinstance(token, int) for token in tokens)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
