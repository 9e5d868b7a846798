"""Errors that travel to another process, and the end of a process whose leader is gone."""

from __future__ import annotations

import os
import pickle
import sys
import threading


def portable(error: BaseException) -> BaseException:
    """The error, or its text where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just written
    except Exception:  # noqa: BLE001 - whatever cannot travel goes as text
        return RuntimeError(repr(error))
    return error


def end_with_leader() -> None:
    """End this process when the one that started it closes our standard input, or is dead."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
