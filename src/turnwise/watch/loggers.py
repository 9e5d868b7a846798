"""Sends metrics to TensorBoard, Weights & Biases or trackio. The run directory has everything without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from turnwise.errors import ConfigError
from turnwise.watch.observer import ForwardingObserver, Observer


class MetricLogger(Protocol):
    """An object that receives metrics. Pass your own with `turnwise.train(..., loggers=[it])`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the metrics of a step or of an evaluation."""
        ...


class LoggerObserver(ForwardingObserver):
    """Gives a run's metrics to a logger; calls the logger's `close` at the end, if it has one."""

    def __init__(self, logger: MetricLogger) -> None:
        self._logger = logger

    def source(self, callback: str) -> str:
        return f"logger {type(self._logger).__name__}.{'log' if callback == 'metrics' else callback}"

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._logger.log(step, values)

    def close(self) -> None:
        close = getattr(self._logger, "close", None)
        if close is not None:
            close()


def check_metric_loggers(loggers: object) -> tuple[MetricLogger, ...]:
    """Refuse anything but a list of objects that take metrics."""
    expected = "expected a list of objects with log(step, values)"
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        raise ConfigError(f"loggers={loggers!r}; {expected}")
    for logger in cast(Sequence[Any], loggers):
        if isinstance(logger, str):
            raise ConfigError(f"loggers: {logger!r} is a name; {expected}, or run={{'loggers': [{logger!r}]}}")
        if not callable(getattr(logger, "log", None)):
            raise ConfigError(f"loggers: {type(logger).__name__} has no log(step, values); {expected}")
    return tuple(cast(Sequence[Any], loggers))


def open_loggers(
    names: Sequence[str], directory: Path, *, project: str, run_name: str, settings: Mapping[str, Any]
) -> list[Observer]:
    """Start the loggers that `run.loggers` names; `settings` is the whole config, for their pages."""
    loggers: list[Observer] = []
    for name in names:
        if name == "tensorboard":
            loggers.append(_TensorBoard(_module(name, "tensorboard.summary"), directory / "tensorboard"))
        else:
            module = _module(name, name)
            try:
                module.init(project=project, name=run_name, config=dict(settings))
            except getattr(module, "Error", ()) as cause:  # above all from wandb, if the user is not logged in
                raise ConfigError(
                    f"{name} does not start: {cause} Log in, set WANDB_MODE=offline, or leave it out of run.loggers"
                ) from cause
            loggers.append(_Hosted(module))
    return loggers


def check_loggers(names: Sequence[str]) -> None:
    """Refuse a logger that is not installed, before anything is spent."""
    for name in names:
        _module(name, name)


class _TensorBoard(Observer):
    def __init__(self, module: Any, directory: Path) -> None:
        self._writer = module.Writer(str(directory))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Hosted(Observer):
    """wandb or trackio, which have the same functions."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


def _module(logger: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as cause:
        raise ConfigError(
            f"run.loggers names {logger}, which is not installed; install it with: pip install "
            f"'turnwise[{logger}]', or leave it out of run.loggers"
        ) from cause
