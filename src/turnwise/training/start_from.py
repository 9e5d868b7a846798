"""`model.from`: the weights that a new run starts with, from another run or a checkpoint; its world may be another one.

A run is resolved to one checkpoint when the new run is set up, and the new run writes that down. So a run that is
resumed before its first checkpoint starts from the same weights, also if the other run has gone on meanwhile. Only
weights are taken: the optimizer, the critic and the steps are the new run's own.
"""

from __future__ import annotations

from pathlib import Path

from turnwise.client.checkpoints import INFO_FILE, SCHEMES, CheckpointStore, read_info
from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml
from turnwise.errors import ConfigError
from turnwise.models import store as model_store
from turnwise.models.config import ModelConfig
from turnwise.models.directories import ADAPTER_CONFIG, is_same_model
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.checkpoint import choose_checkpoint

SHAPE = ("train", "rank", "train_attn", "train_mlp", "train_unembed")
"""Options of the model that the weights of a checkpoint fix."""


def resolve_start(config: Config) -> Config:
    """The config with `model.from` as one checkpoint; one that does not fit the model is refused."""
    start = config.model.start_from
    if not start:
        return config
    path = Path(start).expanduser()
    found = _of_run(path, config) if is_run(path) else _of_checkpoint(start, config)
    return config.model_copy(update={"model": config.model.model_copy(update={"start_from": found})})


def _of_run(path: Path, config: Config) -> str:
    with RunReader(path) as run:
        stored = config_from_yaml(run.config_yaml, str(run.directory)).model
        row = choose_checkpoint(run, "best").row
    _check_same(stored, config.model, f"model.from={path}")
    if config.model.base_url:
        return row.path
    return str(CheckpointStore(path).directory(row.path).resolve())


def _of_checkpoint(start: str, config: Config) -> str:
    if config.model.base_url:
        return start  # the service knows its own checkpoints, and refuses what it cannot load
    is_path = start.startswith(SCHEMES)
    place = CheckpointStore(model_store.home()).directory(start) if is_path else Path(start).expanduser()
    info = read_info(place) if (place / INFO_FILE).is_file() else None
    if info is None and not (place / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"model.from={start} is neither a run nor a checkpoint; expected a run directory, a directory with "
            f"{INFO_FILE} or {ADAPTER_CONFIG}, or a path such as tinker://..."
        )
    if info is not None:
        wanted = config.model.alias or config.model.name
        if not any(is_same_model(one, wanted) for one in (info.stored_model, info.model_directory)):
            raise ConfigError(
                f"model.from={start} belongs to {info.stored_model}, and model.name is {wanted}; expected a checkpoint "
                "of the same base model"
            )
        if info.lora is not None and (config.model.train == "full" or info.lora.rank != config.model.rank):
            raise ConfigError(
                f"model.from={start} is an adapter of rank {info.lora.rank}; set model.train=lora "
                f"model.rank={info.lora.rank}"
            )
        if info.lora is None and config.model.train != "full":
            raise ConfigError(f"model.from={start} holds all weights; set model.train=full")
    return str(place.resolve())


def _check_same(stored: ModelConfig, wanted: ModelConfig, option: str) -> None:
    names = (stored.alias or stored.name, wanted.alias or wanted.name)
    if not is_same_model(*names):
        raise ConfigError(
            f"{option} was trained on model={names[0]}, and this run has model={names[1]}; an adapter belongs to its "
            f"base model: set model={names[0]}"
        )
    for name in SHAPE:
        if getattr(stored, name) != getattr(wanted, name):
            raise ConfigError(
                f"{option} has model.{name}={getattr(stored, name)}, and this run has {getattr(wanted, name)}; "
                f"set model.{name}={getattr(stored, name)}"
            )
