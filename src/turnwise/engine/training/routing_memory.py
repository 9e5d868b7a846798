"""The sampler's choice of experts, kept on the host until the trainer learns from the same tokens.

A sequence is known by its token ids: what the trainer reads of a dialogue (all tokens but the last) is what the sampler
ran through the model. So nothing has to travel with turns and datums. The oldest sequences are forgotten first.

Shape legend: T tokens of a sequence, N packed tokens, L layers with experts, K experts of one token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from turnwise.engine.model.routing import UNKNOWN, ReplayedRouting
from turnwise.engine.ops.interface import Ops, PendingRead
from turnwise.engine.training.pack import PackedBatch

MAX_BYTES = 4 << 30
"""Most host memory: about ten million tokens of 48 layers with 8 experts each."""


class RoutingMemory:
    """Choices by token ids."""

    def __init__(self, num_layers: int, num_chosen: int, max_bytes: int = MAX_BYTES) -> None:
        self._shape = (num_layers, num_chosen)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[bytes, PendingRead] = OrderedDict()
        self._sizes: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, ids: Sequence[int] | np.ndarray, choices: PendingRead) -> None:
        """Keep the experts [T, L, K] of a sequence; a newer choice of the same ids replaces an older one."""
        key = _key(ids)
        self._forget(key)
        self._known[key] = choices
        self._sizes[key] = 2 * len(ids) * self._shape[0] * self._shape[1]
        self._num_bytes += self._sizes[key]
        while self._num_bytes > self._max_bytes and len(self._known) > 1:
            self._forget(next(iter(self._known)))

    def _forget(self, key: bytes) -> None:
        if self._known.pop(key, None) is not None:
            self._num_bytes -= self._sizes.pop(key)

    def find(self, ids: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """[T, L, K] int16, or None if the sampler did not run these tokens, or long ago."""
        found = self._known.get(_key(ids))
        return None if found is None else found.wait().numpy()

    def replay(self, batch: PackedBatch, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """[N, L, K] int16: the choice for each packed token, `UNKNOWN` where there is none.

        `sequences` are those that `batch.members` counts.
        """
        choices = np.full((batch.num_tokens, *self._shape), UNKNOWN, dtype=np.int16)
        for member, index in zip(batch.members, batch.packed_index, strict=True):
            known = self.find(sequences[member])
            if known is not None:
                choices[index] = known
        return choices


def _key(ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def replayed(parts: Sequence[np.ndarray], ops: Ops) -> ReplayedRouting:
    """The routing of a pass over packed forests that stand one after the other."""
    choices = np.ascontiguousarray(np.concatenate(parts).transpose(1, 0, 2))
    return ReplayedRouting(ops.transfer.upload(choices))


def routing_metrics(passes: Sequence[ReplayedRouting]) -> dict[str, float]:
    """How often the trainer's own router would have chosen another expert than the sampler's did."""
    if not passes:
        return {}
    flips, replays = torch.stack([one.flips() for one in passes]).sum(dim=0).tolist()
    total = sum(one.num_choices for one in passes)
    return {"routing_flips:mean": flips / max(1, replays), "routing_replayed:mean": replays / max(1, total)}
