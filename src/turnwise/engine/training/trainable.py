"""What a training client trains.

The engine, the clients and the service know only the protocol `Trainable`. Its implementations: `LoraAdapter`, the
adapter with a value head (`critic.CriticAdapter`), and all weights of the model (`full_weights.FullWeights`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from turnwise.engine.model.lora import LoraWeights, Policy, Span, num_parameters, split_pairs
from turnwise.engine.training import adapter_files
from turnwise.engine.training.objective import TOKEN_LOGPROBS, Objective
from turnwise.errors import CheckpointError
from turnwise.models.linears import Shape
from turnwise.types import LoraConfig


class Trainable(Protocol):
    """Parameters, their gradient and their optimizer's state, and how a pass uses them."""

    flat: Tensor
    """All parameters, float32, in one tensor."""
    grad: Tensor
    """The gradient collected since the last optimizer step, in the order of `flat`."""
    exp_avg: Tensor
    """AdamW's first moments, in the order of `flat`."""
    exp_avg_sq: Tensor
    """AdamW's second moments, in the order of `flat`."""
    num_steps: int
    """Optimizer steps taken so far."""
    has_gradient: bool
    """Whether something was added to `grad` since the last optimizer step."""

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter's shape; None if all weights are trained."""
        ...

    @property
    def objective(self) -> Objective:
        """What a pass computes at each position: the logprob of a target token, or the value of the state."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory on the device: parameters, gradient and optimizer state."""
        ...

    def span(self, start: int, stop: int) -> Span:
        """The route of packed tokens [start, stop) through these weights."""
        ...

    def publish(self, dtype: torch.dtype) -> Policy:
        """Return a version to sample from that never changes; raise a ConfigError if there is none, with the reason."""
        ...

    def weights_moved(self) -> None:
        """Called after `flat` has changed."""
        ...

    def save(self, directory: Path, base_model: str, *, with_optimizer: bool) -> None:
        """Write a complete directory or nothing."""
        ...

    def load(self, directory: Path, *, with_optimizer: bool) -> None:
        """Replace the parameters and clear the gradient. The optimizer is restored, or starts again."""
        ...

    def free(self) -> None:
        """Free the device's memory; the object cannot be used afterwards."""
        ...


class LoraAdapter(LoraWeights):
    """A LoRA adapter in training: parameters and gradients are views into flat tensors."""

    objective: Objective = TOKEN_LOGPROBS
    lora: LoraConfig
    grad_pairs: dict[str, tuple[Tensor, Tensor]]

    def __init__(
        self, lora: LoraConfig, shapes: Mapping[str, Shape], device: torch.device, *, num_more: int = 0
    ) -> None:
        """`num_more` parameters at the end of the flat tensor belong to a subclass; they start at zero."""
        flat = torch.zeros(num_parameters(shapes, lora) + num_more, dtype=torch.float32, device=device)
        super().__init__(lora, shapes, flat)
        generator = torch.Generator().manual_seed(lora.seed if lora.seed is not None else torch.seed() % 2**63)
        for a, _ in self.pairs.values():
            bound = 1 / math.sqrt(
                a.shape[-1]
            )  # A starts as in PEFT, Kaiming-uniform with a = sqrt(5); B starts at zero
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
        self.grad = torch.zeros_like(flat)
        self.exp_avg = torch.zeros_like(flat)
        self.exp_avg_sq = torch.zeros_like(flat)
        self.num_steps = 0
        self.has_gradient = False
        self.pairs = {name: (_leaf(a), _leaf(b)) for name, (a, b) in self.pairs.items()}
        self.grad_pairs = split_pairs(self.grad, shapes, lora)
        for name, (a, b) in self.pairs.items():
            a.grad, b.grad = self.grad_pairs[name]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.flat, self.grad, self.exp_avg, self.exp_avg_sq))

    def publish(self, dtype: torch.dtype) -> Policy:
        return Policy(self.lora, self.shapes, self.flat.clone(), dtype)

    def weights_moved(self) -> None:
        """Passes read `flat` itself."""

    def save(self, directory: Path, base_model: str, *, with_optimizer: bool) -> None:
        files = self._more_files()
        if with_optimizer:
            moments = {"exp_avg": self.exp_avg.cpu(), "exp_avg_sq": self.exp_avg_sq.cpu()}
            files[adapter_files.OPTIMIZER_FILE] = adapter_files.TensorFile(moments, {"num_steps": str(self.num_steps)})
        adapter_files.write_adapter(self, directory, base_model, files)

    def load(self, directory: Path, *, with_optimizer: bool) -> None:
        flat = self._read_parameters(directory)  # everything is read before anything is changed
        if with_optimizer:
            moments, self.num_steps = adapter_files.read_optimizer(directory, self.flat.numel())
            self.exp_avg.copy_(moments["exp_avg"])
            self.exp_avg_sq.copy_(moments["exp_avg_sq"])
        else:
            self.num_steps = 0
            self.exp_avg.zero_()
            self.exp_avg_sq.zero_()
        self.flat.copy_(flat)
        self.grad.zero_()
        self.has_gradient = False

    def free(self) -> None:
        for tensor in (self.flat, self.grad, self.exp_avg, self.exp_avg_sq):
            tensor.resize_(0)

    def _more_files(self) -> dict[str, adapter_files.TensorFile]:
        """Further files that a subclass saves beside A and B."""
        return {}

    def _read_parameters(self, directory: Path) -> Tensor:
        """Read the value of `flat` from `directory`."""
        if adapter_files.is_critic(directory):
            raise CheckpointError(f"{directory} is a critic, not a policy; create a critic's client from it")
        return adapter_files.read_flat(directory, self.shapes, self.lora, self.flat)


def _leaf(view: Tensor) -> Tensor:
    """A leaf tensor with the same storage that collects gradients."""
    return view.detach().requires_grad_(True)
