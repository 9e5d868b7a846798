"""Chat replies with a heuristic in the place of a preference judge.

The judge is three rules of thumb that anyone can check by hand: enough words but not too many, whole sentences, few
repeated words. It knows nothing about what is true or helpful, and a policy can please it without being either. It is
here because it costs nothing, gives the same score twice and shows where a judge model plugs in: subclass
`ChatAdapter` and override `compute_reward`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.errors import ConfigError
from turnwise.single_turn.adapter import RLAdapter

QUESTIONS = (
    "What is a good way to start the day?",
    "Tell me about your favourite season.",
    "How do I learn to cook?",
    "Why is the sky blue?",
    "What should I pack for a walk in the hills?",
    "Give me one tip for sleeping better.",
    "What makes a good friend?",
    "How does a bicycle stay upright?",
    "Describe the sea to someone who has never seen it.",
    "What can I do on a rainy afternoon?",
    "How do plants drink water?",
    "Recommend a hobby and say why.",
)

MIN_WORDS, MAX_WORDS = 8, 60
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_SENTENCE = re.compile(r"[^.!?]+[.!?]*")


class ChatAdapter(RLAdapter[str]):
    """Single user messages; the reward is `judge`'s score of the reply, from 0 to 1."""

    def __init__(self, questions: Sequence[str] = QUESTIONS) -> None:
        if isinstance(questions, str) or not questions:
            raise ConfigError(f"questions={questions!r}; expected a list of user messages, at least one")
        self.questions = tuple(questions)

    def build_dataset(self) -> list[str]:
        return list(self.questions)

    def make_prompt(self, sample: str, tokenizer: Any) -> list[int]:
        messages = [{"role": "user", "content": sample}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)

    def compute_reward(self, response_text: str, sample: str) -> float:  # noqa: ARG002 - this judge sees the reply alone
        return judge(response_text)


def judge(reply: str) -> float:
    """The mean of three scores from 0 to 1: length, completeness and diversity; a reply without words gets 0.

    >>> judge("Open a window, drink a glass of water and take a short walk outside.")
    1.0
    """
    words = [word.lower() for word in _WORD.findall(reply)]
    if not words:
        return 0.0
    return (length_score(len(words)) + completeness_score(reply) + diversity_score(words)) / 3


def length_score(num_words: int) -> float:
    """1 from `MIN_WORDS` to `MAX_WORDS`; below and above it falls in proportion."""
    if num_words < MIN_WORDS:
        return num_words / MIN_WORDS
    return min(1.0, MAX_WORDS / num_words)


def completeness_score(reply: str) -> float:
    """The share of sentences that begin with a capital or a digit and end with a full stop or a question mark."""
    sentences = [found.strip() for found in _SENTENCE.findall(reply) if _WORD.search(found)]
    complete = [s for s in sentences if (s[0].isupper() or s[0].isdigit()) and s[-1] in ".!?"]
    return len(complete) / len(sentences) if sentences else 0.0


def diversity_score(words: Sequence[str]) -> float:
    """Different words per word; 1 from four in five upwards, since even good prose repeats its articles."""
    return min(1.0, len(set(words)) / len(words) / 0.8)
