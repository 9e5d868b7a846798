"""All weights of a model in training: float32 masters with AdamW's state, and the copy that passes read.

Passes and samplers read the weights in the model's dtype. Publishing copies nothing: a policy shares that copy. While
somebody still holds the policy, the next update writes to another copy, so requests under way keep their weights;
otherwise it writes over the same one. Copies that nobody reads any more are used again, so there are two of them in a
run that samples and trains in turn.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from turnwise.engine.model.full import FullPolicy, FullRoute, ModelWeights, WeightLayout
from turnwise.engine.model.lora import Policy, Span
from turnwise.engine.training import full_files, shard_files
from turnwise.engine.training.objective import TOKEN_LOGPROBS, Objective


class _SpareCopies:
    """Flat tensors that were read once and can be written again."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._spare: list[Tensor] = []
        self._is_closed = False

    def take(self) -> Tensor:
        if self._spare:
            return self._spare.pop()
        return torch.zeros(self._size, dtype=self._dtype, device=self._device)

    def give_back(self, flat: Tensor) -> None:
        if not self._is_closed:
            self._spare.append(flat)

    def close(self) -> None:
        self._is_closed = True
        self._spare.clear()


class FullWeights:
    """A trainable of all weights of one model; it starts as the base model."""

    objective: Objective = TOKEN_LOGPROBS
    lora = None

    def __init__(self, layout: WeightLayout, device: torch.device, dtype: torch.dtype, *, is_fused: bool) -> None:
        """`is_fused` is False for a model that transformers' own code runs: autograd then needs leaves."""
        self.layout = layout
        self.flat = torch.zeros(layout.size, dtype=torch.float32, device=device)
        layout.read_base(self.flat)
        self.grad = torch.zeros_like(self.flat)
        self.exp_avg = torch.zeros_like(self.flat)
        self.exp_avg_sq = torch.zeros_like(self.flat)
        self.num_steps = 0
        self.has_gradient = False
        self._grads = ModelWeights(layout, self.grad)
        self._copies = _SpareCopies(layout.size, dtype, device)
        self._readers: weakref.WeakSet[FullPolicy] = weakref.WeakSet()
        """Published policies that read the current copy."""
        self._is_fused = is_fused
        self._use_new_copy()
        self.weights_moved()

    @property
    def full(self) -> FullRoute:
        """How passes of these weights run."""
        return self._route

    @property
    def num_bytes(self) -> int:
        own = (self.flat, self.grad, self.exp_avg, self.exp_avg_sq, self._current.flat)
        return sum(tensor.nbytes for tensor in own)

    def span(self, start: int, stop: int) -> Span:
        """The route of packed tokens [start, stop), which have the pass to themselves."""
        return Span(start, stop, cast(Any, self))  # `Route.of` reads `full` and nothing else

    def publish(self, dtype: torch.dtype) -> Policy:  # noqa: ARG002 - its copy has the dtype of the engine's weights
        policy = FullPolicy(self._current)
        self._readers.add(policy)
        return policy

    @torch.no_grad()
    def weights_moved(self) -> None:
        """Bring the masters to the copy that passes read."""
        if len(self._readers):
            self._use_new_copy()
        self._current.flat.copy_(self.flat)

    def save(self, directory: Path, base_model: str, *, with_optimizer: bool) -> None:
        if with_optimizer:
            moments = {"exp_avg": self.layout.views(self.exp_avg), "exp_avg_sq": self.layout.views(self.exp_avg_sq)}
            state = full_files.OptimizerState(moments, self.num_steps)
            dtype = self._current.flat.dtype
            full_files.write_state(directory, self.layout.views(self.flat), Path(base_model), state, dtype)
        else:
            full_files.write_weights(directory, self._current.tensors, Path(base_model))

    def load(self, directory: Path, *, with_optimizer: bool) -> None:
        if with_optimizer and shard_files.has_shards(directory):
            self._load_shards(directory)
            return
        state = full_files.read_optimizer(directory, self.layout.places) if with_optimizer else None
        full_files.read_weights(directory, self.layout.views(self.flat))
        for name, own in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            own.zero_()
            if state is not None:
                for parameter, view in self.layout.views(own).items():
                    view.copy_(state.moments[name][parameter])
        self._begin(0 if state is None else state.num_steps)

    def _load_shards(self, directory: Path) -> None:
        """Take over what several learners have saved in parts."""
        num_steps = shard_files.read_num_steps(directory, self.layout)
        kinds = {shard_files.MASTERS: self.flat, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        shard_files.load_whole(directory, self.layout, kinds)
        self._begin(num_steps)

    def _begin(self, num_steps: int) -> None:
        """Set the number of optimizer steps that were made, and the masters and moments that were read from files."""
        self.num_steps = num_steps
        self.grad.zero_()
        self.has_gradient = False
        self.weights_moved()

    def free(self) -> None:
        self._copies.close()
        for tensor in (self.flat, self.grad, self.exp_avg, self.exp_avg_sq):
            tensor.resize_(0)
        del self._current, self._route

    def _use_new_copy(self) -> None:
        """Write the next version elsewhere: policies read the copy that was current."""
        flat = self._copies.take()
        self._current = ModelWeights(self.layout, flat)
        self._readers = weakref.WeakSet()
        weakref.finalize(self._current, self._copies.give_back, flat).atexit = False
        leaves = None if self._is_fused else _leaves(self._current, self._grads)
        self._route = FullRoute(self._current, self._grads, leaves)


def _leaves(weights: ModelWeights, grads: ModelWeights) -> dict[str, Tensor]:
    """The weights as tensors that collect gradients; what autograd finds is added to the float32 gradient at once."""
    leaves: dict[str, Tensor] = {}
    for name, view in weights.tensors.items():
        leaf = view.detach().requires_grad_(True)

        def move(leaf: Tensor, grad: Tensor = grads.tensors[name]) -> None:
            assert leaf.grad is not None, "called after it was added"
            grad.add_(leaf.grad)
            leaf.grad = None

        leaf.register_post_accumulate_grad_hook(move)
        leaves[name] = leaf
    return leaves
