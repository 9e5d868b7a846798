"""Matrix products in plain torch, on any device: x W' with a frozen W, and adapters' low-rank parts."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + b."""
    return torch.nn.functional.linear(x_NI, weight_OI, bias_O)


def multiply(
    a_MK: Tensor, b_KN: Tensor, *, out: Tensor | None = None, alpha: float = 1.0, is_added: bool = False
) -> Tensor:
    """alpha a b, written to `out` or added to it where given."""
    if out is None:
        out = a_MK @ b_KN
        return out if alpha == 1.0 else out.mul_(alpha)
    if out.dtype is a_MK.dtype:
        return torch.addmm(out, a_MK, b_KN, beta=float(is_added), alpha=alpha, out=out)
    if out.is_cuda:  # a sum in float32 of products in bfloat16, in one launch
        return torch.addmm(out, a_MK, b_KN, out_dtype=out.dtype, beta=float(is_added), alpha=alpha, out=out)
    product = a_MK @ b_KN
    return out.add_(product, alpha=alpha) if is_added else out.copy_(product).mul_(alpha)


def takes_low_rank_along(x_NI: Tensor) -> bool:
    """True on a GPU: there the second read of the small product's result costs no extra time."""
    return x_NI.is_cuda


def multiply_with_low_rank(
    a_MK: Tensor, b_KN: Tensor, low_a: Tensor, low_b: Tensor, *, out: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """a b + scale low_a low_b."""
    out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]) if out is None else out
    return multiply(a_MK, b_KN, out=multiply(low_a, low_b, out=out, alpha=scale), is_added=True)


def low_rank_gradients(
    dy_NO: Tensor, low_Nr: Tensor, b_Or: Tensor, grad_b: Tensor, *, out: Tensor, scale: float
) -> None:
    """For y = scale low B': write d loss / d low to `out`, and add d loss / d B to `grad_b`."""
    multiply(dy_NO, b_Or, out=out, alpha=scale)
    multiply(dy_NO.t(), low_Nr, out=grad_b, alpha=scale, is_added=True)


def empty_rows(like: Tensor, rows: int, cols: int) -> Tensor:
    return like.new_empty(rows, cols)
