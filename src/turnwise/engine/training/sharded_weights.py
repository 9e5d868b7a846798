"""All weights of a model in training, in parts: each learner holds its part of the float32 masters, of their gradient,
of AdamW's state, and of the copy that passes gather from.

A published version is one more copy of the parts, under a number of its own; it never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from turnwise.engine.model.full import FullPolicy, FullRoute
from turnwise.engine.model.lora import Policy, Span
from turnwise.engine.model.sharded import (
    BASE_SOURCE,
    ShardedGradients,
    ShardedWeights,
    ShardExchange,
    ShardLayout,
)
from turnwise.engine.training import full_files, shard_files
from turnwise.engine.training.objective import TOKEN_LOGPROBS, Objective
from turnwise.errors import ConfigError

_LEADER_HINT = "the engine that leads the learners does it"
_SOURCES = ("weights", "masters", "exp_avg", "exp_avg_sq", "grad")


class ShardedFullWeights:
    """A trainable of all weights of which this learner holds a part; it starts as the base model."""

    objective: Objective = TOKEN_LOGPROBS
    lora = None

    def __init__(self, shards: ShardLayout, exchange: ShardExchange, number: int) -> None:
        """`number` is the same on all learners, and no other trainable has it."""
        self.shards, self._exchange = shards, exchange
        base = exchange.local(BASE_SOURCE)
        self._weights = base.clone()
        self.flat = base.float() if base.dtype is not torch.float32 else base.clone()
        self.grad = torch.zeros_like(self.flat)
        self.exp_avg = torch.zeros_like(self.flat)
        self.exp_avg_sq = torch.zeros_like(self.flat)
        self.num_steps = 0
        self.has_gradient = False
        first = 1 + len(_SOURCES) * number
        self._sources = {name: first + index for index, name in enumerate(_SOURCES)}
        for name, local in (("weights", self._weights), ("masters", self.flat), ("grad", self.grad)):
            exchange.add(self._sources[name], local)
        exchange.add(self._sources["exp_avg"], self.exp_avg)
        exchange.add(self._sources["exp_avg_sq"], self.exp_avg_sq)
        self._gradients = ShardedGradients(shards, exchange, self._sources["grad"], base.device)
        self._route = FullRoute(self.whole("weights"), self._gradients)

    @property
    def full(self) -> FullRoute:
        """How passes of these weights run."""
        return self._route

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.flat, self.grad, self.exp_avg, self.exp_avg_sq, self._weights))

    @property
    def moments(self) -> Mapping[str, Tensor]:
        """This learner's part of AdamW's state."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def span(self, start: int, stop: int) -> Span:
        """The route of packed tokens [start, stop), which have the pass to themselves."""
        return Span(start, stop, cast(Any, self))  # `Route.of` reads `full` and nothing else

    def publish(self, dtype: torch.dtype) -> Policy:
        raise ConfigError(f"one learner alone has no whole weights to publish in {dtype}; {_LEADER_HINT}")

    def keep_version(self, source: int) -> None:
        """Keep a copy of this learner's part under another number; all learners do."""
        self._exchange.add(source, self._weights.clone())

    def version(self, source: int) -> FullPolicy:
        """The policy of a version that all learners keep."""
        return FullPolicy(ShardedWeights(self.shards, self._exchange, source))

    def finish_gradient(self) -> None:
        """Hand over the gradient of the last unit of a pass."""
        self._gradients.flush()

    @torch.no_grad()
    def weights_moved(self) -> None:
        """Bring the masters to the copy that passes read."""
        self._weights.copy_(self.flat)
        self._exchange.forget()

    def save(self, directory: Path, base_model: str, *, with_optimizer: bool) -> None:
        what = "state" if with_optimizer else "weights"
        raise ConfigError(f"one learner alone has no whole {what} of {base_model} for {directory}; {_LEADER_HINT}")

    def fill(self, directory: Path, base_model: Path, *, with_optimizer: bool) -> None:
        """Write a Hugging Face directory of the gathered weights: the float32 masters, if a run goes on from them.

        The other learners take part in the exchange meanwhile. What the optimizer needs is written by all learners
        (`shard_files.save_shards`).
        """
        whole = self.whole("masters" if with_optimizer else "weights").tensors
        full_files.fill_directory(directory, whole, base_model, self._weights.dtype)

    def load(self, directory: Path, *, with_optimizer: bool) -> None:
        """Take this learner's parts of what one process has saved (`shard_files` reads what several have)."""
        state = full_files.read_optimizer(directory, self.shards.layout.places) if with_optimizer else None
        self.shards.cut(full_files.checked_weights(directory, self.shards.layout.places), self.flat)
        for name, own in self.moments.items():
            own.zero_()
            if state is not None:
                self.shards.cut(state.moments[name], own)
        self.begin(0 if state is None else state.num_steps)

    def begin(self, num_steps: int) -> None:
        """Set the number of optimizer steps that were made, and the masters and moments that were read from files."""
        self.num_steps = num_steps
        self._gradients.forget()
        self.grad.zero_()
        self.has_gradient = False
        self.weights_moved()

    def parts(self) -> dict[str, Tensor]:
        """What a sharded checkpoint holds of this learner, by kind."""
        return {shard_files.MASTERS: self.flat, **self.moments}

    def free(self) -> None:
        for source in self._sources.values():
            self._exchange.drop(source)
        for tensor in (self.flat, self.grad, self.exp_avg, self.exp_avg_sq, self._weights):
            tensor.resize_(0)

    def whole(self, name: str) -> ShardedWeights:
        """The `weights`, `masters`, `grad`, `exp_avg` or `exp_avg_sq` of all learners, gathered when they are read."""
        return ShardedWeights(self.shards, self._exchange, self._sources[name])
