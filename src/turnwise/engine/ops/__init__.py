"""Everything the engine computes on a device, behind one interface (`interface.Ops`).

`for_device` chooses the implementation once per device: C kernels on a CPU, flash attention and Triton kernels on a
GPU, plain torch where neither runs. No other part of the engine asks which device it is on.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from turnwise.engine.ops.interface import Ops


@functools.cache
def bitwise_for_device(device: torch.device) -> Ops:
    """The ops with which sampler and trainer agree to the last bit, slower than the usual ones."""
    usual = for_device(device)
    if device.type == "cpu":
        from turnwise.engine.ops.cpu_ops import make_bitwise
    else:
        from turnwise.engine.ops.cuda_ops import make_bitwise
    return make_bitwise(usual)


@functools.cache
def for_device(device: torch.device) -> Ops:
    """The ops of a device. Asking at every call is cheap: the answer is cached."""
    if device.type == "cpu":
        from turnwise.engine.ops.cpu_ops import make_ops
    elif device.type == "cuda":
        from turnwise.engine.ops.cuda_ops import make_ops
    else:
        from turnwise.engine.ops.torch_ops import make_ops
    return make_ops(device)
