"""Observers of a run: the terminal view, loggers, a notebook's progress, and your own code.

    class PrintReward(Observer):
        def step(self, step, num_steps, metrics):
            print(step, metrics["rollout/reward_mean"])

    turnwise.train("guess_number", model="tiny", observer=PrintReward())

An observer that raises does not damage the run. The observer gets no more calls. The run stops at the next safe place,
saves a checkpoint, and ends with an `ObserverError` that names the observer. The run's state is then `stopped`, and it
can be resumed. A run that was at its end already stays `finished`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from turnwise.errors import ConfigError, TurnwiseError
from turnwise.runlog.schema import AttemptRecord, CheckpointRow, EvaluationRow, Phase


class Observer:
    """Its methods are called when something happens in a run. Subclass it and override what you need.

    All calls come from the thread that trains, one at a time, so a slow observer slows the run down.

    >>> import turnwise as tw
    >>> class Rewards(tw.Observer):
    ...     def __init__(self):
    ...         self.seen = []
    ...     def step(self, step, num_steps, metrics):
    ...         self.seen.append(metrics["rollout/reward_mean"])
    >>> observer = Rewards()
    >>> observer.step(1, 2, {"rollout/reward_mean": 0.5})
    >>> observer.seen
    [0.5]
    """

    def message(self, text: str) -> None:
        """A line for a person, such as an alarm."""

    def phase(self, name: str) -> None:
        """The run begins a phase: loading the model, evaluating, warming up, training."""

    def waiting(self, text: str, seconds: float) -> None:
        """The run is waiting for something; called about four times a second with the reason and the seconds so far."""

    def warmup(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """A supervised step before training ended; `step` counts from 1."""

    def critic(self, batch: int, num_batches: int, metrics: Mapping[str, float]) -> None:
        """A batch of the critic's pre-training ended; `batch` counts from 1."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step ended; `step` counts from 1."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step or of an evaluation, for loggers. Called once for each set of numbers."""

    def attempt(self, step: int, phase: Phase, attempt: AttemptRecord) -> None:
        """An attempt was stored; `phase` is train or eval."""

    def evaluation(self, row: EvaluationRow) -> None:
        """An evaluation on held-out tasks ended."""

    def checkpoint(self, row: CheckpointRow) -> None:
        """A checkpoint was saved."""

    def close(self) -> None:
        """The run is over, however it ended."""


CALLBACKS = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""What an observer is told, by the name of its method."""


def check_observer(observer: object) -> Observer:
    """Refuse what cannot be told what happens, before anything is spent."""
    if isinstance(observer, type):
        name = observer.__name__
        raise ConfigError(f"observer={name} is a class; expected an object, such as observer={name}()")
    missing = [name for name in CALLBACKS if not callable(getattr(observer, name, None))]
    if missing:
        raise ConfigError(
            f"observer: {type(observer).__name__} has no {missing[0]}; expected an object whose class inherits from "
            "turnwise.Observer"
        )
    return cast(Observer, observer)


class ForwardingObserver(Observer, ABC):
    """Passes calls on to an object of another type, which an error then names."""

    @abstractmethod
    def source(self, callback: str) -> str:
        """Say in words whose function `callback` calls."""


class ObserverError(TurnwiseError):
    """An observer or a logger raised; the run stopped and was saved, or had finished."""

    def __init__(self, observer: Observer, callback: str, cause: Exception) -> None:
        source = observer.source(callback) if isinstance(observer, ForwardingObserver) else ""
        source = source or f"observer {type(observer).__name__}.{callback}"
        self.what = f"{source} raised {type(cause).__name__}: {cause}"
        """What happened, without how the run ended."""
        self.outcome: Literal["finished", "stopped"] = "stopped"
        """How the run ended."""
        super().__init__(self.what)

    def __str__(self) -> str:
        if self.outcome == "finished":
            return f"{self.what}. The run had finished, and everything is saved"
        return f"{self.what}. The run was stopped and saved; mend it and resume the run"


class Observers(Observer):
    """Passes every call to several observers, and keeps the error of the first one that raises."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)
        self.error: ObserverError | None = None
        self.on_error: Callable[[ObserverError], None] = lambda _: None
        """Called once for each observer that raises."""

    def message(self, text: str) -> None:
        self._tell("message", text)

    def phase(self, name: str) -> None:
        self._tell("phase", name)

    def waiting(self, text: str, seconds: float) -> None:
        self._tell("waiting", text, seconds)

    def warmup(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._tell("warmup", step, num_steps, metrics)

    def critic(self, batch: int, num_batches: int, metrics: Mapping[str, float]) -> None:
        self._tell("critic", batch, num_batches, metrics)

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._tell("step", step, num_steps, metrics)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._tell("metrics", step, values)

    def attempt(self, step: int, phase: Phase, attempt: AttemptRecord) -> None:
        self._tell("attempt", step, phase, attempt)

    def evaluation(self, row: EvaluationRow) -> None:
        self._tell("evaluation", row)

    def checkpoint(self, row: CheckpointRow) -> None:
        self._tell("checkpoint", row)

    def close(self) -> None:
        """Close the last one first: the view, which is the first, still shows what the others raise."""
        for observer in tuple(reversed(self._observers)):
            error = self._tell_one(observer, "close")
            if error is None:
                self._observers.remove(observer)
            else:
                self.message(error.what)

    def _tell(self, callback: str, *values: Any) -> None:
        for observer in tuple(self._observers):
            self._tell_one(observer, callback, *values)

    def _tell_one(self, observer: Observer, callback: str, *values: Any) -> ObserverError | None:
        try:
            getattr(observer, callback)(*values)
        except Exception as cause:  # noqa: BLE001 - somebody else's code: whatever it raises must not cost the run
            self._observers.remove(observer)
            error = ObserverError(observer, callback, cause)
            error.__cause__ = cause
            self.error = self.error or error
            self.on_error(error)
            return error
        return None
