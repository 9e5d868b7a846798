"""Orders to a run that is going on: stop, or another value for one of a few safe settings.

Whoever gives an order puts a small JSON file into the run's directory (`orders/`), complete or not at all. The run
takes them up within a second, in the order in which they were given, and removes them.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turnwise.config.config import Config
from turnwise.config.files import override_config
from turnwise.errors import ConfigError

SETTINGS = (
    "train.learning_rate",
    "train.steps",
    "train.max_sampled_tokens",
    "train.grad_clip_norm",
    "train.weight_decay",
    "train.save_every",
    "eval.every",
)
"""Settings that can be changed while a run goes on."""
ORDERS = "orders"
Stop = Literal["graceful", "hard"]

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order to a running process: to stop, or settings by name."""

    stop: Stop | None = None
    settings: Mapping[str, float]


def give_order(directory: Path, *, stop: Stop | None = None, settings: Mapping[str, float] | None = None) -> None:
    """Leave an order for the process that trains in `directory`."""
    place = directory / ORDERS
    place.mkdir(exist_ok=True)
    name = f"{time.time_ns():020d}-{os.getpid()}-{next(_numbers)}"
    unfinished = place / f".{name}"
    unfinished.write_text(json.dumps({"stop": stop, "settings": dict(settings or {})}), encoding="utf-8")
    unfinished.rename(place / f"{name}.json")


def take_orders(directory: Path) -> list[Order]:
    """The orders that came since the last call, oldest first. Files that cannot be read are skipped."""
    found: list[Order] = []
    for file in sorted((directory / ORDERS).glob("*.json")):
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            found.append(Order(stop=fields["stop"], settings=fields["settings"]))
        except (ValueError, KeyError, TypeError):
            pass
        file.unlink(missing_ok=True)
    return found


def read_settings(texts: list[str], config: Config) -> dict[str, float]:
    """Texts such as `train.steps=100` to values that the run can take. A mistake is refused before it is sent."""
    settings: dict[str, float] = {}
    for text in texts:
        name, sign, _ = text.partition("=")
        if not sign or name not in SETTINGS:
            raise ConfigError(f"{text}: a run that is going on takes {', '.join(SETTINGS)} only, as {SETTINGS[0]}=1e-5")
        changed = override_config(config, [text])
        section, _, option = name.partition(".")
        settings[name] = getattr(getattr(changed, section), option)
    return settings


class Steering:
    """Settings that one thread puts and the training loop takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settings: dict[str, float] = {}
        self._is_closed = False

    def put(self, settings: Mapping[str, float]) -> bool:
        """Leave settings for the loop; False where it takes no more, because it is over."""
        with self._lock:
            if not self._is_closed:
                self._settings.update({name: value for name, value in settings.items() if name in SETTINGS})
            return not self._is_closed

    def take(self, *, is_last: bool = False) -> dict[str, float]:
        """What came since the last call; after the last one, `put` refuses."""
        with self._lock:
            taken, self._settings = self._settings, {}
            self._is_closed = self._is_closed or is_last
        return taken

    @staticmethod
    def apply(config: Config, name: str, value: float) -> Config:
        return override_config(config, [f"{name}={value!r}"])
