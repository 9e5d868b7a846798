"""The learners that an engine of this process leads, as the training loop sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

from turnwise.client.base import TrainingClient
from turnwise.client.local_clients import LocalTrainingClient
from turnwise.errors import EngineStoppedError
from turnwise.training.learner_news import LearnerNews, OneLearner, learner_metrics


class _LeadingEngine(Protocol):
    """The engine of the first of several learners (`engine/learners/replicated.py`)."""

    num_learners: int
    num_restarts: int

    def take_news(self) -> list[str]: ...

    def begin_step(self) -> None: ...

    def undo_step(self) -> bool: ...


class EngineLearners:
    """The learners behind a training client."""

    def __init__(self, trainer: LocalTrainingClient, engine: _LeadingEngine) -> None:
        self._trainer, self._engine = trainer, engine

    def metrics(self) -> dict[str, float]:
        return learner_metrics(self._engine.num_learners, self._engine.num_restarts)

    def take_news(self) -> Sequence[str]:
        return self._engine.take_news()

    def begin_step(self) -> None:
        self._engine.begin_step()

    async def undo_step(self) -> bool:
        work = self._trainer.worker.run(self._trainer.model_id, lambda _: self._engine.undo_step())
        try:
            return await asyncio.wrap_future(work)
        except EngineStoppedError:  # the error of the learners ended the engine too, which is told already
            return False


def find_learners(trainer: TrainingClient, count: int) -> LearnerNews:
    """The learners of a run, given their number."""
    if count == 1 or not isinstance(trainer, LocalTrainingClient):
        return OneLearner()
    engine = cast(Any, trainer.worker.engine)
    return EngineLearners(trainer, engine) if hasattr(engine, "undo_step") else OneLearner()
