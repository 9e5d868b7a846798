"""FlashAttention 4, where the `flash4` extra is installed on a Hopper card: training's attention in half the time.

Its kernels are compiled when first asked for, a few seconds each; what was compiled is kept under
`$TURNWISE_HOME/kernels/flash4` for the next process. The two functions that we call take and return the log-sum-exp.
They are not public functions of the package, so we check their arguments before we use them.
"""

# pyright: reportMissingImports=false
# Only the extra `flash4` installs the package.

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnwise.engine.ops.build import kernels_folder

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import Varlen

log = logging.getLogger(__name__)

HOPPER = 9
"""First digit of the compute capability; we tried no other."""
HEAD_SIZES = (64, 96, 128)
_RUNS = frozenset({"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"})
_NEEDED = {"_flash_attn_fwd": _RUNS | {"return_lse"}, "_flash_attn_bwd": _RUNS}


def fits(query: Tensor) -> bool:
    """Whether these kernels run on such queries here."""
    return query.is_cuda and query.dtype is torch.bfloat16 and query.shape[-1] in HEAD_SIZES and _package() is not None


@functools.cache
def _package() -> Any:
    """The module with the two functions; None where it is not installed, or is not as we know it."""
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return None
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(kernels_folder() / "flash4"))
    try:
        from flash_attn.cute import interface
    except ImportError as cause:
        log.debug("FlashAttention 4 is not here (%s): PyTorch's flash kernels run", cause)
        return None
    problem = find_problem(interface)
    if problem is not None:
        log.warning("flash-attn-4 %s: PyTorch's flash kernels run, slower; install turnwise[flash4]", problem)
        return None
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)  # its compiler gives it
    return interface


def find_problem(package: Any) -> str | None:
    """What keeps us from calling the package, or None."""
    for name, wanted in _NEEDED.items():
        function = getattr(package, name, None)
        if function is None:
            return f"has no {name}"
        missing = wanted - set(inspect.signature(function).parameters)
        if missing:
            return f"has a {name} without {', '.join(sorted(missing))}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, part: Varlen, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output [N, H, D] and log-sum-exp [H, N] of tokens-first sides."""
    out, logsumexp, *_ = _package()._flash_attn_fwd(q, k, v, **_runs(part, is_causal, scale), return_lse=True)
    return out.contiguous(), logsumexp


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    part: Varlen,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `logsumexp` are those of whole rows."""
    # The parameters are those of `cuda_attention._varlen_backward`, which hands them over as they came.
    dq, dk, dv, *_ = _package()._flash_attn_bwd(q, k, v, out, grad, logsumexp, **_runs(part, is_causal, scale))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _runs(part: Varlen, is_causal: bool, scale: float) -> dict[str, Any]:
    return {
        "cu_seqlens_q": part.q_bounds,
        "cu_seqlens_k": part.k_bounds,
        "max_seqlen_q": part.max_q,
        "max_seqlen_k": part.max_k,
        "causal": is_causal,
        "softmax_scale": scale,
    }
