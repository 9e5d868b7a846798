"""Softmax over a large vocabulary for training, in Triton: logits stay in the model's dtype and are read twice.

Shape legend: R rows of logits (one chunk of the head's product), V vocabulary.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engine.ops.interface import SoftmaxGradients

BLOCK = 4096


@triton.jit
def _row_stats_kernel(logits, temperature, logsumexps, means, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    best = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        scaled = tl.load(logits + row * vocab + column, mask=inside, other=float("-inf")).to(tl.float32) / heat
        new_best = tl.maximum(best, tl.max(scaled, 0))
        exps = tl.exp(scaled - new_best)
        fade = tl.exp(best - new_best)
        total = total * fade + tl.sum(exps, 0)
        weighted = weighted * fade + tl.sum(tl.where(exps > 0, scaled * exps, 0.0), 0)
        best = new_best
    tl.store(logsumexps + row, best + tl.log(total))
    tl.store(means + row, weighted / total)


@triton.jit
def _row_gradients_kernel(
    logits, temperature, logsumexps, entropies, grads, grad_entropies, vocab, BLOCK: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    at = logits + row * vocab + column
    heat = tl.load(temperature + row)
    logprob = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) / heat - tl.load(logsumexps + row)
    prob = tl.exp(logprob)
    slope = -tl.load(grads + row)
    if HAS_ENTROPY:
        along = tl.where(prob > 0, logprob, 0.0) + tl.load(entropies + row)
        slope = slope - tl.load(grad_entropies + row) * along
    tl.store(at, (prob * slope / heat).to(logits.dtype.element_ty), mask=inside)


def row_stats(logits_RV: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and mean of logits / temperature under their softmax, [R] float32 each; entropy is the difference."""
    rows, vocab = logits_RV.shape
    logsumexps = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    means = torch.empty_like(logsumexps)
    _row_stats_kernel[(rows,)](logits_RV, temperature_R, logsumexps, means, vocab, BLOCK, num_warps=8)
    return logsumexps, means


def row_gradients(logits_RV: Tensor, rows: SoftmaxGradients) -> Tensor:
    """Write the gradient over the logits; `interface.SoftmaxOps` has the formula."""
    num_rows, vocab = logits_RV.shape
    has_entropy = rows.entropies is not None and rows.grad_entropies is not None
    _row_gradients_kernel[(num_rows, triton.cdiv(vocab, BLOCK))](
        logits_RV, rows.temperature, rows.logsumexps, rows.entropies if has_entropy else rows.grads, rows.grads,
        rows.grad_entropies if has_entropy else rows.grads, vocab, BLOCK, has_entropy,
    )  # fmt: skip
    return logits_RV
