"""AdamW (arXiv:1711.05101) on the flat tensors of what is trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from turnwise.engine.ops import for_device
from turnwise.engine.training.trainable import Trainable
from turnwise.errors import DataError
from turnwise.types import AdamParams

MAX_SLICE = 1 << 26
"""Numbers that are updated at once; it bounds the memory of the step's temporary tensors."""
CACHED_SLICE = 1 << 17
"""The same for each thread of a CPU: what the update of a slice reads several times stays in the thread's caches."""


@torch.no_grad()
def adamw_step(trainable: Trainable, params: AdamParams, norm: float | None = None) -> dict[str, float]:
    """Update the parameters from the accumulated gradient and clear it. A gradient that is not finite changes
    nothing. `norm` is that of the whole gradient, where this process holds a part of it."""
    if norm is None:
        norm = float(torch.linalg.vector_norm(trainable.grad))
    if not math.isfinite(norm):
        trainable.grad.zero_()
        trainable.has_gradient = False
        raise DataError(
            f"the gradient norm is {norm}: this step was skipped and the gradient cleared; "
            "check advantages and logprobs for extreme values, or lower the learning rate"
        )
    grad = trainable.grad
    if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
        grad.mul_(params.grad_clip_norm / norm)
    trainable.num_steps += 1
    numbers = (trainable.flat, grad, trainable.exp_avg, trainable.exp_avg_sq)
    size = MAX_SLICE if for_device(grad.device).facts.has_own_memory else CACHED_SLICE * torch.get_num_threads()
    flat, grads, means, squares = (tensor.split(size) for tensor in numbers)
    for part in zip(flat, grads, means, squares, strict=True):
        _update(*part, params, trainable.num_steps)
    grad.zero_()
    trainable.has_gradient = False
    trainable.weights_moved()
    return {"grad_norm": norm, "optimizer_step": float(trainable.num_steps), "learning_rate": params.learning_rate}


def _update(
    flat: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, params: AdamParams, num_steps: int
) -> None:
    exp_avg.lerp_(grad, 1 - params.beta1)
    exp_avg_sq.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    correction1 = 1 - params.beta1**num_steps
    correction2 = 1 - params.beta2**num_steps
    denominator = (exp_avg_sq / correction2).sqrt_().add_(params.eps)
    if params.weight_decay:
        flat.mul_(1 - params.learning_rate * params.weight_decay)
    flat.addcdiv_(exp_avg, denominator, value=-params.learning_rate / correction1)
