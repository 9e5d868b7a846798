"""Settings of the whole process, for commands in which an event loop plays while another thread samples.

A library leaves such settings alone, and so do our clients. A command may change them, and restores them at its end.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 0.0001
"""How long a thread that computes may hold Python's lock while another one waits. Python's default is fifty times as
long, which is more than a decode step on a GPU takes, and torch releases and takes the lock at every launch."""


@contextmanager
def settled_process() -> Generator[None]:
    """Switch threads fast, and keep the garbage collector off what is loaded already. Enter it after loading.

    A full collection visits every object that torch and transformers made, which takes a fifth of a second, and a
    rollout causes one every few steps. Frozen objects are not visited again.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, SWITCH_INTERVAL_S))
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
