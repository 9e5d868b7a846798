"""x W' with a frozen W: most of the time of a sampler and of a training step's forward.

A decode step multiplies few rows with every weight of the model. On a CPU the usual x @ W' then runs far below both
the memory's and the cores' speed; our kernel streams each weight row once past all x rows. Without a C compiler,
W @ x' is the faster order of the two that BLAS offers for few rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import linear

from turnwise.engine.kernels import cpu

MAX_FEW_ROWS = 512
"""Above this many rows BLAS is as fast."""


@functools.cache
def cpu_kernels() -> cpu.CpuKernels | None:
    return cpu.load()


def frozen_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + b; records no gradient."""
    if x_NI.device.type != "cpu" or x_NI.dtype is not torch.float32 or x_NI.shape[0] > MAX_FEW_ROWS:
        return linear(x_NI, weight_OI, bias_O)
    kernels = cpu_kernels()
    if kernels is not None:
        return kernels.linear_small(weight_OI, x_NI.contiguous(), bias=bias_O)
    y = (weight_OI @ x_NI.t()).t().contiguous()
    return y if bias_O is None else y.add_(bias_O)
