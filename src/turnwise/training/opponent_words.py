"""The words of `env.options.opponent` before anything is loaded: what they mean, what is refused, what the plan says.

fair, tough ...        a script of the world
base                   the model before training
self                   the policy's newest weights
pool                   base, snapshots, scripts, by weights (`turnwise.opponents.pool`)
runs/a, DIR, tinker:// a checkpoint: the best of a run, or one by itself
smollm2, DIR           another model
http://...             an OpenAI-compatible address; `opponent.model` is the model's name there
tinker+http://...      a Tinker service; `opponent.model` is a base model or a `tinker://` path there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turnwise.client.checkpoints import INFO_FILE, SCHEMES, CheckpointStore, read_info
from turnwise.config.config import Config
from turnwise.engine.budget import format_bytes
from turnwise.engine.device_info import DeviceInfo, find_device, numbered_device
from turnwise.envs.base import World
from turnwise.envs.remote.client import WorkedWorld, worked_part
from turnwise.envs.seats import TwoSidedWorld
from turnwise.envs.wrapped import WorldWrapper
from turnwise.errors import ConfigError, ModelError
from turnwise.models import store as model_store
from turnwise.models.directories import ADAPTER_CONFIG
from turnwise.models.facts import read_facts
from turnwise.opponents.config import OpponentConfig
from turnwise.opponents.seating import two_sided
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.checkpoint import choose_checkpoint

BASE, SELF, POOL = "base", "self", "pool"
TINKER_PREFIX = "tinker+"
Kind = Literal["script", "base", "self", "pool", "checkpoint", "model", "address", "tinker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpponentSource:
    """What the words of an option mean."""

    kind: Kind
    words: str
    files: Path | None = None
    """The files of a checkpoint, or the directory of a model."""
    base: Path | None = None
    """The directory of its base model, where that is known."""
    run: Path | None = None
    """The directory of the run that a checkpoint belongs to, where that is known."""


def find_source(words: str, world: TwoSidedWorld) -> OpponentSource:
    """Read an option. What is neither a script nor anything that can be found is refused, with what was tried."""
    if words in world.scripted_opponents:
        return OpponentSource(kind="script", words=words)
    for kind in (BASE, SELF, POOL):
        if words == kind:
            return OpponentSource(kind=kind, words=words)
    if words.startswith(("http://", "https://")):
        return OpponentSource(kind="address", words=words)
    if words.startswith(TINKER_PREFIX):
        return OpponentSource(kind="tinker", words=words)
    files = _checkpoint_files(words)
    if files is not None:
        info = read_info(files)
        base = Path(info.model_directory) if info is not None else None
        return OpponentSource(kind="checkpoint", words=words, files=files, base=base, run=_run_of(files))
    try:
        directory = model_store.resolve_model(words).directory
    except ModelError as cause:
        scripts = ", ".join(world.scripted_opponents)
        raise ConfigError(
            f"opponent={words}: expected a script ({scripts}), base, self, pool, a run or checkpoint directory, an "
            f"address such as http://127.0.0.1:8000/v1, or a model; as a model: {cause}"
        ) from cause
    return OpponentSource(kind="model", words=words, files=directory, base=directory)


def _checkpoint_files(words: str) -> Path | None:
    path = Path(words).expanduser()
    if is_run(path):
        with RunReader(path) as run:
            row = choose_checkpoint(run, "best").row
        return CheckpointStore(path).directory(row.path)
    if words.startswith(SCHEMES):
        return CheckpointStore(model_store.home()).find(words).directory
    return path if (path / INFO_FILE).is_file() or (path / ADAPTER_CONFIG).is_file() else None


def _run_of(files: Path) -> Path | None:
    """Checkpoints of a run are at RUN/checkpoints/ID/weights/NAME."""
    above = list(files.absolute().parents)[3:4]
    return above[0] if above and is_run(above[0]) else None


def default_panel(sided: TwoSidedWorld) -> tuple[str, ...]:
    """The opponents of an evaluation, if the config names none: fixed ones, so that evaluations compare."""
    if sided.opponent in (SELF, POOL):
        return (BASE, sided.scripted_opponents[0])
    return (sided.opponent,)


def panel_of(config: Config, sided: TwoSidedWorld) -> tuple[str, ...]:
    return config.opponent.panel or default_panel(sided)


def num_panel(config: Config, world: World) -> int:
    """How many opponents play every held-out task; 1 where the world has no opponent."""
    sided = two_sided(world)
    return 1 if sided is None else len(panel_of(config, sided))


def check_opponents(config: Config, world: World) -> None:
    """Refuse opponents that cannot be found, and options that nobody reads, before anything is spent."""
    changed = [f"opponent.{name}" for name in config.opponent.changed_options()]
    part = worked_part(world)
    if isinstance(part, WorkedWorld) and needs_opponents(config, part.inner):
        raise ConfigError(
            f"cluster.env_workers={config.cluster.env_workers!r}, and {world.name} has an opponent that this process "
            "samples from; play it here, or set the opponent and its panel to a script of the world"
        )
    sided = two_sided(world)
    if sided is None:
        if changed:
            raise ConfigError(f"{changed[0]} is not read by {world.name}, which has no opponent; leave it out")
        return
    sources = [find_source(words, sided) for words in {sided.opponent, *panel_of(config, sided)}]
    moving = [source.words for source in sources if source.words in panel_of(config, sided) and source.kind == POOL]
    if moving:
        raise ConfigError("opponent.panel=pool changes from step to step; expected opponents that stay as they are")
    _check_unread(config.opponent, changed, {source.kind for source in sources}, sided)
    _check_loads(config, world, changed)
    if config.opponent.train == "both":
        _check_both(config, world, sided)
    if sided.opponent == POOL:
        _check_pool(config)
    if config.opponent.deadline_s >= config.rollout.step_deadline_s and {s.kind for s in sources} != {"script"}:
        raise ConfigError(
            f"opponent.deadline_s={config.opponent.deadline_s:g} is not less than rollout.step_deadline_s="
            f"{config.rollout.step_deadline_s:g}, so the env would be blamed for a slow opponent; change one of them"
        )


def check_panel_stays(config: Config, world: World) -> None:
    """Refuse evaluations of a training run against the policy itself: the opponent of the next one would be another."""
    sided = two_sided(world)
    if sided is not None and SELF in panel_of(config, sided):
        raise ConfigError(
            "opponent.panel=self learns between the evaluations, so they would not compare; expected opponents that "
            "stay as they are. After training: turnwise eval RUN opponent.panel=self"
        )


READ_BY: Mapping[str, tuple[Kind, ...]] = {
    "model": ("address", "tinker"),
    "api_key_variable": ("address", "tinker"),
    "device": ("model", "checkpoint"),
    "kv_cache_gib": ("model", "checkpoint"),
    "train": ("self",),
    "snapshot_every": ("pool",),
    "keep_last": ("pool",),
    "base_weight": ("pool",),
    "last_weight": ("pool",),
    "best_weight": ("pool",),
    "scripted_weight": ("pool",),
    "keep_files": ("pool",),
}
"""Which opponents read an option of the section. The others are read by every opponent that is a model."""


def _check_unread(config: OpponentConfig, changed: Sequence[str], kinds: set[Kind], sided: TwoSidedWorld) -> None:
    for option in changed:
        name = option.removeprefix("opponent.")
        if name == "panel" or kinds & set(READ_BY.get(name, ())) or (name not in READ_BY and kinds != {"script"}):
            continue
        raise ConfigError(f"{option} is not read by env.options.opponent={sided.opponent}; leave it out")
    if kinds & {"address", "tinker"} and not config.model:
        raise ConfigError("opponent.model is empty; an address needs the name of the model that is asked there")


def _check_loads(config: Config, world: World, changed: Sequence[str]) -> None:
    """Refuse options of a model that is loaded beside the policy's where none is."""
    found = next((one for one in changed if one in ("opponent.device", "opponent.kv_cache_gib")), None)
    if found is not None and not config.model.base_url and not _other_bases(config, world):
        raise ConfigError(
            f"{found} is for an opponent of another base model, and here every opponent has the policy's own, which "
            "samples where the policy does; leave it out"
        )


def _check_pool(config: Config) -> None:
    weights = [f"{name}_weight" for name in ("base", "last", "best", "scripted")]
    if not sum(getattr(config.opponent, weight) for weight in weights):
        raise ConfigError(f"the pool is empty: opponent.{', '.join(weights)} are all 0; give one of them a weight")
    if not config.rollout.same_start:
        raise ConfigError(
            "opponent=pool with rollout.same_start=false: the attempts of a group would meet different opponents, and "
            "advantages would compare these; leave same_start out"
        )


def _check_both(config: Config, world: World, sided: TwoSidedWorld) -> None:
    if isinstance(world, WorldWrapper):
        raise ConfigError("opponent.train=both: a reward function or a judge scores one seat only; leave it out")
    if sided.opponent != SELF:
        raise ConfigError(f"opponent.train=both with opponent={sided.opponent}; expected env.options.opponent=self")
    if config.method.branches or config.reads_stored:
        raise ConfigError(
            f"opponent.train=both with method={config.method.name}: the two seats are played from the start, "
            "side by side; expected a method that plays groups, such as grpo"
        )


def needs_opponents(config: Config, world: World) -> bool:
    """Whether somebody other than the world's own script plays, in training or in evaluations."""
    sided = two_sided(world)
    return sided is not None and (
        sided.opponent not in sided.scripted_opponents or panel_of(config, sided) != (sided.opponent,)
    )


def other_bytes(config: Config, world: World, device: DeviceInfo) -> int:
    """What opponents with other base models take of the policy's device: weights and KV cache, once for each base."""
    bases = set(_other_bases(config, world).values())
    if not bases or not _shares_device(config, device):
        return 0
    facts = (read_facts(base, runs_here=True) for base in bases)
    cache = round(config.opponent.kv_cache_gib * 2**30)
    return sum(one.num_parameters * device.dtype_bytes + cache for one in facts)


def _other_bases(config: Config, world: World) -> dict[str, Path]:
    """The directories of the other base models that are loaded beside the policy's, by the words of the opponent."""
    sided = two_sided(world)
    if sided is None or config.model.base_url:
        return {}
    own = model_store.resolve_model(config.model.alias or config.model.name).directory.resolve()
    sources = [find_source(words, sided) for words in dict.fromkeys((sided.opponent, *panel_of(config, sided)))]
    bases = {source.words: source.base.resolve() for source in sources if source.base is not None}
    return {words: base for words, base in bases.items() if base != own}


def _shares_device(config: Config, device: DeviceInfo) -> bool:
    """Whether opponents are loaded on the policy's device."""
    own = config.engine_in_use.device
    return numbered_device(config.opponent.device or own, device.kind) == numbered_device(own, device.kind)


def opponent_line(config: Config, world: World) -> list[str]:
    """Lines of the plan: who plays the other seat, who plays in evaluations, and what another base model takes."""
    sided = two_sided(world)
    if sided is None or not needs_opponents(config, world):
        return []
    lines = [f"opponent     {sided.opponent}; in evaluations: {', '.join(panel_of(config, sided))}"]
    engine = config.engine_in_use
    device = engine.model_copy(update={"device": config.opponent.device or engine.device})
    for words, base in _other_bases(config, world).items():
        weights = read_facts(base, runs_here=True).num_parameters * find_device(device).dtype_bytes
        cache = f"KV cache {config.opponent.kv_cache_gib:.2f} GiB"
        lines.append(f"             {words} is loaded beside the policy: weights {format_bytes(weights)}, {cache}")
    return lines
