"""What our commands set for the process that they are, in which a loop plays and a thread samples, both in Python.

Libraries leave such settings alone, and so do our clients; a command may change them, and puts them back at its end.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 0.0001
"""How long a thread that computes may keep another one from going on. By default it is fifty times as long, more than a
decode step on a GPU takes, and torch gives the lock away, and asks for it again, at every launch."""


@contextmanager
def settled_process() -> Iterator[None]:
    """Enter it when everything is loaded.

    A full collection of garbage looks at all that torch and transformers brought along, for a fifth of a second, and
    a rollout causes one every few steps; what is there already is not looked at again.
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
