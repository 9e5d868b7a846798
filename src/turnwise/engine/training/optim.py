"""AdamW (arXiv:1711.05101) on an adapter's flat tensors."""

from __future__ import annotations

import math

import torch

from turnwise.engine.model.lora import Adapter
from turnwise.errors import DataError
from turnwise.types import AdamParams


@torch.no_grad()
def adamw_step(adapter: Adapter, params: AdamParams) -> dict[str, float]:
    """One update from the accumulated gradient, which is cleared; a gradient that is not finite changes nothing."""
    norm = float(torch.linalg.vector_norm(adapter.grad))
    if not math.isfinite(norm):
        adapter.grad.zero_()
        raise DataError(
            f"the gradient norm is {norm}: this step was skipped and the gradient cleared; "
            "check advantages and logprobs for extreme values, or lower the learning rate"
        )
    grad = adapter.grad
    if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
        grad.mul_(params.grad_clip_norm / norm)
    adapter.num_steps += 1
    adapter.exp_avg.lerp_(grad, 1 - params.beta1)
    adapter.exp_avg_sq.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    correction1 = 1 - params.beta1**adapter.num_steps
    correction2 = 1 - params.beta2**adapter.num_steps
    denominator = (adapter.exp_avg_sq / correction2).sqrt_().add_(params.eps)
    if params.weight_decay:
        adapter.flat.mul_(1 - params.learning_rate * params.weight_decay)
    adapter.flat.addcdiv_(adapter.exp_avg, denominator, value=-params.learning_rate / correction1)
    grad.zero_()
    return {"grad_norm": norm, "optimizer_step": float(adapter.num_steps), "learning_rate": params.learning_rate}
