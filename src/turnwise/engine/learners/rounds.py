"""Learners that hold the weights in parts exchange them in rounds.

A learner that needs a unit, or has the gradient of one, says so; all learners hear what all want, and then carry out
every wish together. A learner that wants nothing takes part with nothing. So learners need not be at the same place of
the same pass: one may have more passes than the others, or sample alone. Where all are at the same place, a round is
one gather. Rounds end when nobody wants anything any more.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.engine.learners.collective import LearnerCollective
from turnwise.engine.model.sharded import ShardLayout, ShardPlace


class ExchangeError(RuntimeError):
    """A learner did not come to a round, or has failed."""


class _Kind(IntEnum):
    GATHER = 0
    REDUCE = 1
    DONE = 2
    FAILED = 3


class _Wish(NamedTuple):
    kind: int
    source: int = 0
    unit: int = 0


class ShardRounds:
    """One learner's side of the exchange (`ShardExchange`)."""

    def __init__(self, place: ShardPlace) -> None:
        self.place = place
        self.is_open = False
        """Whether the other learners take part in rounds now."""
        self._shards: ShardLayout | None = None
        self._ranks: LearnerCollective | None = None
        self._sources: dict[int, Tensor] = {}
        self._last: tuple[_Wish, Tensor] | None = None
        """The unit that was gathered last: a block is read several times in a row."""

    def use(self, shards: ShardLayout) -> None:
        self._shards = shards

    def connect(self, ranks: LearnerCollective) -> None:
        """Exchange over these ranks from now on."""
        self._ranks = ranks
        self.is_open = False
        self.forget()

    def add(self, source: int, local: Tensor) -> None:
        self._sources[source] = local
        self.forget()

    def local(self, source: int) -> Tensor:
        return self._sources[source]

    def drop(self, source: int) -> None:
        self._sources.pop(source, None)
        self.forget()

    def forget(self) -> None:
        self._last = None

    def open(self) -> None:
        """Take part in rounds until `finish`."""
        self.is_open = True

    def finish(self) -> Generator[None, None, None]:
        """Take part until no learner needs anything."""
        is_over = False
        while not is_over:
            is_over = self._round(_Wish(_Kind.DONE), None)
            yield
        self.is_open = False

    def fail(self) -> None:
        """Tell the others that this learner cannot go on."""
        self.is_open = False
        try:
            self._round(_Wish(_Kind.FAILED), None)
        except ExchangeError:
            return  # this learner's own failure, or that of another one

    def gather(self, source: int, unit: int) -> Tensor:
        wish = _Wish(_Kind.GATHER, source, unit)
        if self._last is None or self._last[0] != wish:
            self._last = None  # free it before the next one is formed
            self._round(wish, None)
        assert self._last is not None, "the round has gathered it"
        return self._last[1]

    def reduce(self, source: int, unit: int, whole: Tensor) -> None:
        self._round(_Wish(_Kind.REDUCE, source, unit), whole)

    def _round(self, own: _Wish, whole: Tensor | None) -> bool:
        """Carry out all learners' wishes; returns whether there was none."""
        assert self._ranks is not None, "connected when the learners have met"
        assert self._shards is not None, "set when the model is cut"
        try:
            wishes = [_Wish(*wish) for wish in self._ranks.tell(own)]
            if any(wish.kind == _Kind.FAILED for wish in wishes):
                failed = [rank for rank, wish in enumerate(wishes) if wish.kind == _Kind.FAILED]
                raise ExchangeError(f"learner {failed[0]} failed while it shared weights")
            wanted = sorted({wish for wish in wishes if wish.kind != _Kind.DONE})
            for wish in wanted:
                self._carry_out(wish, whole if wish == own else None, self._shards, self._ranks)
        except ExchangeError:
            raise
        except RuntimeError as cause:
            raise ExchangeError(f"weights could not be exchanged: {cause}") from cause
        self._keep_own(own)
        return not wanted

    def _carry_out(self, wish: _Wish, own: Tensor | None, shards: ShardLayout, ranks: LearnerCollective) -> None:
        local = shards.part(wish.unit, self._sources[wish.source])
        # A unit that the sampler gathers serves a training pass too, so it must not be an inference tensor.
        with torch.inference_mode(False), torch.no_grad():
            if wish.kind == _Kind.GATHER:
                whole = local.new_empty(shards.whole_size(wish.unit))
                ranks.gather(whole, local)
                self._last = wish, whole
                return
            whole = own if own is not None else local.new_zeros(shards.whole_size(wish.unit))
            summed = torch.empty_like(local)
            ranks.reduce(summed, whole)
            local.add_(summed)

    def _keep_own(self, own: _Wish) -> None:
        """Free a unit that only others wanted."""
        if self._last is not None and self._last[0] != own:
            self._last = None
