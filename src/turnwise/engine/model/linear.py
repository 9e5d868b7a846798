"""Matrix products: x W' with a frozen W, most of the time of a sampler and of a training step, and adapters' parts.

A decode step multiplies few rows with every weight of the model. On a CPU the usual x @ W' then runs far below both
the memory's and the cores' speed; our kernel streams each weight row once past all x rows. Without a C compiler,
W @ x' is the faster order of the two that BLAS offers for few rows. Products of many rows, forward and backward, have
a kernel of their own.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import linear

from turnwise.engine.ops import cpu, cpu_low_rank, cpu_products

MAX_FEW_ROWS = 384
"""Above this many rows the kernel for few rows brings nothing."""

CACHE_LINE, SET_BYTES = 64, 4096
"""Of a CPU's L1 cache: rows that lie a multiple of `SET_BYTES` apart share one set of lines."""


@functools.cache
def cpu_kernels() -> cpu.CpuKernels | None:
    return cpu.load()


def frozen_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + b; records no gradient."""
    if x_NI.device.type != "cpu" or x_NI.dtype is not torch.float32:
        return linear(x_NI, weight_OI, bias_O)
    if x_NI.shape[0] > MAX_FEW_ROWS:
        y = multiply(x_NI, weight_OI.t())
        return y if bias_O is None else y.add_(bias_O)
    kernels = cpu_kernels()
    if kernels is not None:
        return kernels.linear_small(weight_OI, x_NI.contiguous(), bias=bias_O)
    y = (weight_OI @ x_NI.t()).t().contiguous()
    return y if bias_O is None else y.add_(bias_O)


def empty_rows(like: Tensor, rows: int, cols: int) -> Tensor:
    """[rows, cols] for a product to write and others to read, with room between rows that would share one set."""
    gap = CACHE_LINE if like.is_cpu and cols * like.itemsize % SET_BYTES == 0 else 0
    return like.new_empty(rows, cols + gap // like.itemsize)[:, :cols]


def adds_low_rank(x_NI: Tensor) -> bool:
    """Whether a product with these rows takes its adapter's part along (`multiply_with_low_rank`)."""
    if x_NI.is_cuda:
        return True
    is_many = x_NI.is_cpu and x_NI.shape[0] > MAX_FEW_ROWS
    return is_many and x_NI.dtype is torch.float32 and cpu_products.is_built()


def multiply_with_low_rank(
    a_MK: Tensor, b_KN: Tensor, low_a: Tensor, low_b: Tensor, *, out: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """a b + scale low_a low_b, where `adds_low_rank`: the large product is written once, low-rank part included."""
    out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]) if out is None else out
    if a_MK.is_cuda:  # reading what the small product wrote is hidden behind the large one
        return multiply(a_MK, b_KN, out=multiply(low_a, low_b, out=out, alpha=scale), is_added=True)
    return cpu_products.multiply(a_MK, b_KN, out, low_rank=(low_a, low_b, scale))


def multiply(
    a_MK: Tensor, b_KN: Tensor, *, out: Tensor | None = None, alpha: float = 1.0, is_added: bool = False
) -> Tensor:
    """alpha a b, into `out` or added to it where given; records no gradient."""
    if a_MK.device.type == "cpu" and _is_ours(a_MK, b_KN, out) and cpu_products.is_built():
        if out is None:
            out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
        return cpu_products.multiply(a_MK, b_KN, out, alpha=alpha, is_added=is_added)
    if out is None:
        out = a_MK @ b_KN
        return out if alpha == 1.0 else out.mul_(alpha)
    if out.dtype is a_MK.dtype:
        return torch.addmm(out, a_MK, b_KN, beta=float(is_added), alpha=alpha, out=out)
    if out.is_cuda:  # a sum in float32 of products in bfloat16, in one launch
        return torch.addmm(out, a_MK, b_KN, out_dtype=out.dtype, beta=float(is_added), alpha=alpha, out=out)
    product = a_MK @ b_KN
    return out.add_(product, alpha=alpha) if is_added else out.copy_(product).mul_(alpha)


def low_rank_gradients(
    dy_NO: Tensor, low_Nr: Tensor, b_Or: Tensor, grad_b: Tensor, *, out: Tensor, scale: float
) -> None:
    """Of y = scale low B': d loss / d low goes to `out`, d loss / d B is added to `grad_b`."""
    if dy_NO.is_cpu and cpu_low_rank.fits(dy_NO, low_Nr, b_Or, grad_b, out):
        cpu_low_rank.gradients(dy_NO, low_Nr, grad_b, b_Or, out, scale)
        return
    multiply(dy_NO, b_Or, out=out, alpha=scale)
    multiply(dy_NO.t(), low_Nr, out=grad_b, alpha=scale, is_added=True)


def _is_ours(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.dtype is torch.float32 for tensor in tensors)
