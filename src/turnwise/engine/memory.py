"""Keep freed memory for the next tensors, and keep the garbage collector away from imported modules.

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
    """Set glibc's thresholds, once per process; does nothing with other C libraries. Returns whether it took effect."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, KEEP_BYTES) and mallopt(_M_TRIM_THRESHOLD, 2 * KEEP_BYTES - 1))


@functools.cache
def spare_imports_from_collection() -> None:
    """Exclude the hundreds of thousands of objects of imported modules from garbage collection; once per process.

    One walk over them takes tens of milliseconds, and the GPU is idle during that time. Objects that exist
    already are still freed when nothing refers to them; only cycles among them are not found any more.
    """
    gc.collect()
    gc.freeze()
