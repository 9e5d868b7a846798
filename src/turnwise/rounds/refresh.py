"""Trains a flywheel's outcome model again, as the policy drifts: `flywheel.refresh_verdict`.

    rounds/03/verified.jsonl    the attempts of the rounds before, with the verdict of the world's verifier
    rounds/03/verdict/          the outcome model that judges from round 3 on

A refreshed model learns from what the first one learned from and from all verified attempts since, with the options of
the first one. Attempts of the round that it judges first are not among them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnwise.client.local import ServiceClient
from turnwise.config.config import Config
from turnwise.envs.joint import without_level
from turnwise.errors import ConfigError
from turnwise.outcomes.labelled import LabelledAttempt, write_labelled
from turnwise.outcomes.model import open_outcome_model
from turnwise.rounds.config import FlywheelConfig
from turnwise.rounds.store import PoolStore
from turnwise.training.orm import ATTEMPTS, SETTINGS, OrmConfig, train_outcome_model
from turnwise.training.setup import make_service

STAGE = "verdict"
"""The stage of a round that trains the outcome model again."""


def check_refresh(options: FlywheelConfig) -> None:
    """Refuse to refresh an outcome model that does not say how it was trained."""
    place = Path(options.verdict).expanduser()
    for name in (SETTINGS, ATTEMPTS) if options.refresh_verdict else ():
        if not (place / name).is_file():
            raise ConfigError(
                f"flywheel.refresh_verdict={options.refresh_verdict} trains {place} again, and it holds no {name}; "
                "copy the whole directory that turnwise orm train made, or set refresh_verdict=0"
            )


def is_due(options: FlywheelConfig, number: int) -> bool:
    """Whether a round begins with a refreshed outcome model."""
    every = options.refresh_verdict
    return bool(every) and number > 1 and (number - 1) % every == 0


def verdict_of(store: PoolStore, options: FlywheelConfig, number: int) -> str:
    """What judges in a round: the option, or the outcome model that was refreshed last."""
    rows = store.query("SELECT detail FROM stages WHERE stage = ? AND round <= ? ORDER BY round", STAGE, number)
    if not rows:
        return options.verdict
    return str((store.directory / json.loads(rows[-1]["detail"])["model"]).resolve())


def refresh(store: PoolStore, options: FlywheelConfig, config: Config, number: int) -> dict[str, Any]:
    """Train the outcome model of a round, or go on with a training that was stopped; says which it is and how good."""
    place, data = store.round_place(number, STAGE), store.round_place(number, "verified.jsonl")
    first = Path(options.verdict).expanduser()
    verified = store.attempts("a.round < ? AND a.is_success IS NOT NULL", number)
    if not verified:
        raise ConfigError(
            f"flywheel.refresh_verdict={options.refresh_verdict}: the world said of no attempt whether it succeeded, "
            "so there is nothing to learn a verdict from; set refresh_verdict=0"
        )
    if not data.is_file():
        world = str(store.meta("world"))
        ordered = sorted(verified, key=lambda one: (one.round, one.task_id, one.trajectory.attempt))
        write_labelled(
            data,
            [
                LabelledAttempt(
                    world=world,
                    task_id=without_level(one.task_id),
                    messages=tuple(one.trajectory.messages),
                    label=bool(one.is_success),
                )
                for one in ordered
            ],
        )
    service = make_service(config, None)
    try:
        own = service if isinstance(service, ServiceClient) else None
        result = train_outcome_model([first / ATTEMPTS, data], place, _options_of(first), service=own)
    finally:
        service.close()
    relative = str(place.relative_to(store.directory))
    return {"model": relative, "attempts": len(verified), "accuracy": result.quality.accuracy}


def _options_of(directory: Path) -> OrmConfig:
    stored = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
    given: dict[str, Any] = {name: value for name, value in stored.items() if name in OrmConfig.model_fields}
    given["model"] = open_outcome_model(directory).info.base_model
    return OrmConfig(**given)
