"""Keep the memory that tensors free, and the garbage collector away from what lives as long as the process.

glibc gives large blocks back to the kernel as soon as they are freed, and every new tensor then pays for its pages
again: on a CPU that costs more than most elementwise operations themselves (measured: 12x for an RMS norm of 512 x
576), and beside a GPU it is the time in which the card waits for a batch to be laid out. Raising two thresholds keeps
such blocks in the process, where the next tensor of that size finds them warm.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 1 << 30
"""Blocks up to this size are kept."""


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc, once per process; other C libraries are left alone. Returns whether it took effect."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, KEEP_BYTES) and mallopt(_M_TRIM_THRESHOLD, 2 * KEEP_BYTES - 1))


@functools.cache
def spare_imports_from_collection() -> None:
    """Once per process: later collections no longer walk the hundreds of thousands of objects of imported modules.

    One such walk takes tens of milliseconds, in which a card that waits for its next step is idle. Objects that exist
    already are still freed when nothing refers to them; only cycles among them are not found any more.
    """
    gc.collect()
    gc.freeze()
