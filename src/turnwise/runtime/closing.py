"""A with statement for things that have to be closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClosedOnExit(ABC):
    """Something with a `close` method. A with statement calls it at the end of its block."""

    @abstractmethod
    def close(self) -> None:
        """Free what this object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
