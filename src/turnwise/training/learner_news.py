"""What a run knows of its learner processes: how many train, which were lost, and how to go back before a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnwise.training.supply import Batch


class LearnerNews(Protocol):
    """The processes that train."""

    def metrics(self) -> dict[str, float]:
        """How many there are, for the metrics of a step; none where one process trains."""
        ...

    def take_news(self) -> Sequence[str]:
        """What happened to them since the last call."""
        ...

    def begin_step(self) -> None:
        """A training step begins; `undo_step` goes back to here."""
        ...

    async def undo_step(self) -> bool:
        """Bring back the weights before the step. False: they are gone."""
        ...


class OneLearner:
    """One process trains, or a service elsewhere."""

    def metrics(self) -> dict[str, float]:
        return {}

    def take_news(self) -> Sequence[str]:
        return ()

    def begin_step(self) -> None:
        """Do nothing: no other process can be lost."""

    async def undo_step(self) -> bool:
        return False


def learner_metrics(num_learners: int, num_restarts: int) -> dict[str, float]:
    """The metrics of a step where several learners train."""
    return {"learners/count": float(num_learners), "learners/restarts": float(num_restarts)}


@dataclass(slots=True)
class OpenStep:
    """A step that has begun and is not written down yet."""

    version: int
    """The version of the weights before it."""
    batches: list[Batch] = field(default_factory=list[Batch])
    """What it was given."""
