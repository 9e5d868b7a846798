"""Which server knows the beginning of a prompt: the next turn of a conversation goes to where its last turn was read.

A request carries no conversation's name, and needs none: the next prompt of a conversation begins with its last prompt
and its last reply. So the router remembers where known sequences end, by a hash of all their tokens, and finds the
longest one that a prompt begins with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_KNOWN = 100_000
"""Sequences that are remembered; the one that was used longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """The server that read a known beginning of a prompt."""

    server: str
    is_reply: bool
    """It ends with a reply that this server drew: the prompt goes on with that conversation. Else it ends with a
    prompt, which several conversations may share."""


class PrefixRoutes:
    """Remembers, for each version of the weights, which server has read which sequence of tokens."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._known: OrderedDict[tuple[str | None, int, int], KnownPrefix] = OrderedDict()
        self._factors = np.zeros(0, dtype=np.uint64)

    def find(self, weights: str | None, prompt: Sequence[int]) -> KnownPrefix | None:
        """The server that read the longest known beginning of this prompt, if there is one."""
        hashes = self._hashes(prompt).tolist()
        for length in range(len(hashes), 0, -1):
            key = (weights, length, hashes[length - 1])
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        return None

    def remember(self, weights: str | None, tokens: Sequence[int], route: KnownPrefix) -> None:
        """Note that a server has read or drawn these tokens."""
        if not tokens:
            return
        self._known[weights, len(tokens), int(self._hashes(tokens)[-1])] = route
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def forget_server(self, server: str) -> None:
        """Forget what a server has read, because its cache is lost."""
        for key in [key for key, value in self._known.items() if value.server == server]:
            del self._known[key]

    def _hashes(self, tokens: Sequence[int]) -> NDArray[np.uint64]:
        """A hash of every beginning of the tokens: sums of tokens, each times a random number of its place."""
        if len(tokens) > len(self._factors):
            size = max(4096, 2 * len(tokens))
            self._factors = np.random.default_rng(0).integers(1, 2**63, size=size, dtype=np.uint64)
        values = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
        return np.cumsum(values * self._factors[: len(tokens)])  # wraps around, which is meant
