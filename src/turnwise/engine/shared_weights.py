"""The whole weights of one published version, for another process that reads them on the same GPU.

`WholeWeights` names every tensor as Hugging Face files do and adds an adapter to its linears one at a time: no second
copy of the model is made. A `WeightShare` packs the tensors, chunk by chunk, into one buffer whose CUDA IPC handle the
other process opens. The chunk in the buffer is valid until the next one is asked for, and the buffer's memory until the
share is closed: whoever sends a handle waits until it was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Policy, split_pairs
from turnwise.errors import ConfigError

MIN_BUFFER_BYTES = 256 * 2**20
"""A buffer is as large as the largest tensor, and at least this large or as large as all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChunk:
    """Tensors that lie side by side in a buffer, in this order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of torch's dtypes, such as `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    """Bytes of each tensor."""
    handles: Mapping[str, tuple[Any, ...]]
    """By the UUID of the GPU: what `torch.multiprocessing.reductions.rebuild_cuda_tensor` takes to open the buffer."""


class ExportedBuffer(Protocol):
    """Bytes that another process can open."""

    @property
    def bytes(self) -> Tensor:
        """[size] uint8."""
        ...

    @property
    def handles(self) -> Mapping[str, tuple[Any, ...]]: ...

    def settle(self) -> None:
        """Wait until what was written is there: the other process does not know our stream."""
        ...

    def close(self) -> None:
        """Let the memory go, once the other process has let it go too."""
        ...


class WholeWeights:
    """Every tensor of a model with one published version of its weights; they never change."""

    def __init__(self, model: CausalModel, policy: Policy) -> None:
        if model.shards is not None:
            raise ConfigError("the learners hold the weights in parts, and none of them has them all")
        self._policy = policy  # holds a copy of all weights that the trainer would write over
        self._tensors = model.layout.parameters if policy.full is None else policy.full.weights.tensors
        self._pairs = {} if policy.full is not None else split_pairs(policy.flat, policy.shapes, policy.lora)
        unknown = sorted(name for name in self._pairs if f"{name}.weight" not in self._tensors)
        if unknown:
            raise ConfigError(
                f"the adapter changes {unknown[0]}, which has no weights of its own in this model: an output head that "
                "shares the embedding's, or routed experts"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor, by name; a tied output head is not named."""
        return {name: tensor.nbytes for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """W, or W + scale * B A where the policy is an adapter; the sum is rounded once."""
        base, pair = self._tensors[name].detach(), self._pairs.get(name.removesuffix(".weight"))
        if pair is None:
            return base
        a, b = pair
        return torch.addmm(base.float(), b, a, alpha=self._policy.scale).to(base.dtype)

    def buffer_bytes(self) -> int:
        """How large a buffer to send them with is."""
        sizes = self.sizes.values()
        return max(*sizes, min(MIN_BUFFER_BYTES, sum(sizes)))


class WeightShare:
    """One pass over whole weights through a buffer. Use it in the engine's thread."""

    def __init__(self, weights: WholeWeights, buffer: ExportedBuffer) -> None:
        self._weights = weights
        self._buffer = buffer
        self._left = deque(weights.sizes.items())

    @torch.no_grad()
    def next_chunk(self) -> SharedChunk | None:
        """Put the next tensors into the buffer, in place of the last ones; None when there are no more."""
        room = self._buffer.bytes
        packed: list[tuple[str, Tensor]] = []
        sizes: list[int] = []
        while self._left and sum(sizes) + self._left[0][1] <= len(room):
            name, _ = self._left[0]
            tensor = self._weights.read(name).contiguous()
            start = sum(sizes)
            if start % tensor.element_size():  # a reader cannot look at numbers that begin between two of their places
                break
            room[start : start + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            packed.append((name, tensor))
            sizes.append(tensor.nbytes)
            self._left.popleft()
        if not packed:
            return None
        self._buffer.settle()
        return SharedChunk(
            names=tuple(name for name, _ in packed),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in packed),
            shapes=tuple(tuple(tensor.shape) for _, tensor in packed),
            sizes=tuple(sizes),
            handles=self._buffer.handles,
        )

    def close(self) -> None:
        """Let the buffer go."""
        self._left.clear()
        self._buffer.close()
