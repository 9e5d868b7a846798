"""Additions with an exact-match verifier: the smallest task whose reward cannot be argued with."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ConfigError
from turnwise.single_turn.adapter import RLAdapter

_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Addition:
    """A question and, in the same place, its answer: the two cannot drift apart."""

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"Q: What is {self.left} + {self.right}?\nA:"

    @property
    def answer(self) -> int:
        return self.left + self.right


EXAMPLES = (Addition(2, 2), Addition(6, 1), Addition(5, 4))
"""Shown solved before every question, and never asked: a small model learns from them that an answer is a number."""


class MathAdapter(RLAdapter[Addition]):
    """`Q: What is 3 + 5?` with reward 1 when the first integer of the response is the sum, else 0."""

    def __init__(self, *, num_samples: int = 64, max_addend: int = 9, seed: int = 0) -> None:
        if num_samples < 1 or max_addend < 1:
            raise ConfigError(f"num_samples={num_samples}, max_addend={max_addend}; expected at least 1 of each")
        self.num_samples = num_samples
        self.max_addend = max_addend
        self.seed = seed

    def build_dataset(self) -> list[Addition]:
        """`num_samples` different additions, or all there are if that is fewer."""
        addends = range(self.max_addend + 1)
        questions = [Addition(left, right) for left in addends for right in addends]
        questions = [question for question in questions if question not in EXAMPLES]
        return random.Random(self.seed).sample(questions, min(self.num_samples, len(questions)))

    def make_prompt(self, sample: Addition, tokenizer: Any) -> list[int]:
        solved = "".join(f"{example.question} {example.answer}\n" for example in EXAMPLES)
        return tokenizer.encode(solved + sample.question)

    def compute_reward(self, response_text: str, sample: Addition) -> float:
        found = _INTEGER.search(response_text)
        return float(found is not None and int(found.group()) == sample.answer)
