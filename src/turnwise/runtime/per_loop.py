"""Values that event loops cannot share, such as locks and tasks: each loop gets its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value per event loop, made on first use and dropped with the loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self) -> T:
        """The value of the loop that runs in this thread."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._values:
                self._values[loop] = self._make()
            return self._values[loop]
