"""Finds the earlier places of a sequence's last tokens, and what came after them there.

The index looks at prompts, at replies under way and at finished replies: the attempts of a group, and earlier attempts
at the same task, often say the same again. It is bounded: the oldest finished replies go first. A table of fixed size
maps the hash of some tokens to the newest place where they stand; whoever looks there compares the tokens themselves,
so an entry that is overwritten or gone costs a draft and nothing else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SIZES = (8, 4, 2)
"""Tokens that must agree: many of them say better what comes next than few do."""
MOST_TOKENS = 1 << 17
"""Tokens of finished replies, and as many of prompts, that are kept."""
TABLE_BITS = 21
"""More places than runs of tokens, so that few of them are overwritten."""
POSITION_BITS = 24
BULK = 16
"""A running reply is added to the table this many tokens at a time."""
_ALL_BITS = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_POWERS = [pow(0xD1342543DE82EF95, power + 1, 1 << 64) for power in range(SIZES[0])]


@dataclass(eq=False, slots=True)
class Text:
    """A prompt or a reply, known by its number."""

    number: int
    tokens: array[int]
    """Grows while the reply is being sampled."""
    start: int = 0
    """The first position to find. For a reply it is some tokens earlier, so that the reply's beginning is found."""
    offset: int = 0
    """The position of `tokens[0]` in its sequence."""
    num_found: int = 0
    """Positions up to this one are in the table."""

    @property
    def length(self) -> int:
        return self.offset + len(self.tokens)


@dataclass(eq=False, slots=True)
class Match:
    """The last `length` tokens of a sequence, or more, also stand in `text` before `position`."""

    text: Text
    position: int
    length: int


class SuffixIndex:
    """Texts, and the places of short runs of their tokens."""

    def __init__(self) -> None:
        self._table = np.zeros(1 << TABLE_BITS, dtype=np.int64)
        self._texts: dict[int, Text] = {}
        self._prompts: OrderedDict[bytes, Text] = OrderedDict()
        self._finished: OrderedDict[int, Text] = OrderedDict()
        self._num_prompt_tokens = self._num_finished_tokens = 0
        self._next_number = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that the index keeps alive; running replies are not counted, their rows keep them."""
        return self._num_prompt_tokens + self._num_finished_tokens

    def add_prompt(self, tokens: array[int]) -> None:
        """Add a prompt, or say that it is in use again."""
        key = tokens.tobytes()
        if key in self._prompts:
            self._prompts.move_to_end(key)
            return
        self._prompts[key] = text = self._add(Text(0, tokens))
        self._extend(text)
        self._num_prompt_tokens += len(tokens)
        while self._num_prompt_tokens > MOST_TOKENS and len(self._prompts) > 1:
            _, old = self._prompts.popitem(last=False)
            del self._texts[old.number]
            self._num_prompt_tokens -= len(old.tokens)

    def begin(self, tokens: array[int], num_prompt: int) -> Text:
        """Add a reply under way; `tokens` are the prompt and the reply, and grow."""
        start = max(0, num_prompt - SIZES[0])
        return self._add(Text(0, tokens, start=start, num_found=start))

    def grow(self, text: Text, *, is_due: bool = False) -> None:
        """Make the new tokens of a reply findable, if there are some of them or if it `is_due`."""
        if is_due or text.length - text.num_found > BULK:
            self._extend(text)

    def finish(self, text: Text) -> None:
        """Keep a complete reply, without its prompt."""
        self._extend(text)
        text.tokens, text.offset = text.tokens[text.start :], text.start
        self._finished[text.number] = text
        self._num_finished_tokens += len(text.tokens)
        while self._num_finished_tokens > MOST_TOKENS and len(self._finished) > 1:
            number, old = self._finished.popitem(last=False)
            del self._texts[number]
            self._num_finished_tokens -= len(old.tokens)

    def drop(self, text: Text) -> None:
        """Forget a reply that was given up."""
        self._texts.pop(text.number, None)

    def find(self, tokens: array[int]) -> Match | None:
        """A place where the last tokens of a sequence stand and another token follows: by as many tokens as possible,
        and of those the newest."""
        last = tokens[-SIZES[0] :]
        last.reverse()
        for size, slot in reversed(_slots_of(last)):
            number, position = divmod(int(self._table[slot]), 1 << POSITION_BITS)
            text = self._texts.get(number)
            if text is None:
                continue
            stop = position - text.offset
            if stop < len(text.tokens) and text.tokens[stop - size : stop] == tokens[-size:]:
                return Match(text, position, size)
        return None

    def _add(self, text: Text) -> Text:
        text.number = self._next_number
        self._next_number += 1
        self._texts[text.number] = text
        return text

    def _extend(self, text: Text) -> None:
        """Put the runs into the table that end after `num_found` and before the text's last token."""
        stop = text.length - 1
        if stop <= text.num_found or stop >= 1 << POSITION_BITS:
            return
        first = max(text.start, text.num_found + 1 - SIZES[0])
        ids = np.frombuffer(text.tokens[first - text.offset : stop - text.offset], dtype=np.int32).astype(np.uint64)
        sums = np.zeros(len(ids) + 1, dtype=np.uint64)
        for used in range(1, SIZES[0] + 1):
            # sums[i]: the hash of the `used` tokens that end before i; the newest has the first power.
            if used > len(ids):
                break
            sums[used:] += ids[: len(ids) - used + 1] * np.uint64(_POWERS[used - 1])
            if used in SIZES:
                begin = max(used, text.num_found + 1 - first)
                slots = _slots(sums[begin:], used)
                positions = np.arange(first + begin, stop + 1, dtype=np.int64)
                self._table[slots] = positions + (text.number << POSITION_BITS)
        text.num_found = stop


def _slots(sums: np.ndarray, size: int) -> np.ndarray:
    mixed = (sums + np.uint64(size)) * np.uint64(_MULTIPLIER)
    return (mixed >> np.uint64(64 - TABLE_BITS)).astype(np.int64)


def _slots_of(newest_first: Sequence[int]) -> list[tuple[int, int]]:
    """(size, slot) of each run that a sequence ends with, the shortest first."""
    found: list[tuple[int, int]] = []
    total = 0
    for used, token in enumerate(newest_first, start=1):
        total += token * _POWERS[used - 1]
        if used in SIZES:
            found.append((used, ((total + used) * _MULTIPLIER & _ALL_BITS) >> (64 - TABLE_BITS)))
    return found
