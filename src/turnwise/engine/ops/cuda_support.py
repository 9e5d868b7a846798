"""Whether our Triton kernels and flash attention run on this card; one line in the log says so where they do not."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

MAX_FLASH_HEAD = 256
MAX_DECODE_HEAD = 256
"""The tiles of larger heads do not fit the fast memory that our decode kernel holds them in."""
OLDEST_CARD = (8, 0)
"""Compute capability from which the flash kernels run, and bfloat16 in Triton."""


def triton_tree() -> Any:
    """The module with our kernels for trees, where `has_triton`."""
    from turnwise.engine.ops import triton_tree as module

    return module


def triton_decode(head_size: int) -> Any:
    """The module with our decode kernel, or None where Triton does not run or heads are too large for it."""
    if not has_triton() or head_size > MAX_DECODE_HEAD:
        return None
    from turnwise.engine.ops import triton_decode as module

    return module


@functools.cache
def has_triton() -> bool:
    """Whether our kernels run here; where they do not, plain torch does the same, and one line says so."""
    if not is_new_enough():
        _warn_slower("our kernels")
        return False
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as cause:
        log.warning("Triton is not available (%s): plain torch runs in place of our kernels, slower", cause)
        return False
    return True


@functools.cache
def fits_flash(dtype: torch.dtype, head_size: int) -> bool:
    """Whether the flash kernels run here; where they do not, dense attention does, and one line says so.

    float32 is dense by design, which is nothing to warn of.
    """
    if dtype is torch.float32:
        return False
    if not is_new_enough():
        _warn_slower("flash attention")
        return False
    if head_size % 8 or head_size > MAX_FLASH_HEAD:
        log.warning("heads of %d: flash attention does not take them, dense attention runs, slower", head_size)
        return False
    return True


def is_new_enough() -> bool:
    """Whether the card has the instructions that the kernels are made of."""
    return torch.cuda.get_device_capability() >= OLDEST_CARD


def _warn_slower(what: str) -> None:
    log.warning(
        "this card has compute capability %d.%d, and %s would need %d.%d: plain torch runs in place, slower",
        *torch.cuda.get_device_capability(),
        what,
        *OLDEST_CARD,
    )
