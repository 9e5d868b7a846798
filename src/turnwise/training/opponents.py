"""The opponents of a run: from the words of `env.options.opponent` to players.

    fair, tough ...        a script of the world
    base                   the model before training
    self                   the policy's newest weights
    pool                   base, snapshots, scripts, by weights (`turnwise.opponents.pool`)
    runs/a, DIR, tinker:// a checkpoint: the best of a run, or one by itself
    smollm2, DIR           another model
    http://...             an OpenAI-compatible address; `opponent.model` is the model's name there
    tinker+http://...      a Tinker service; `opponent.model` is a base model or a `tinker://` path there

Weights of the policy's own base model are sampled by the engine that trains, in the same batches. Another base model is
loaded beside it, before it, so that the engine plans with the memory that is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.checkpoints import INFO_FILE, SCHEMES, CheckpointStore, read_info
from turnwise.client.local import ServiceClient
from turnwise.client.publish import NewestSampler, VersionedSampler
from turnwise.client.remote import RemoteServiceClient
from turnwise.config.config import Config
from turnwise.engine.budget import format_bytes
from turnwise.engine.device_info import find_device
from turnwise.envs.base import Task, World
from turnwise.envs.remote.client import WorkedWorld, worked_part
from turnwise.envs.seats import RESULT, Opponent, ScriptedOpponent, TwoSidedWorld
from turnwise.envs.wrapped import WorldWrapper
from turnwise.errors import CheckpointError, ConfigError, ModelError, ServiceError
from turnwise.judges.models import AddressModel
from turnwise.models import store as model_store
from turnwise.models.facts import ModelFacts, read_facts
from turnwise.opponents.config import OpponentConfig
from turnwise.opponents.players import AddressOpponent, SamplerOpponent
from turnwise.opponents.pool import SNAPSHOT_FILES, OpponentPool, PoolState
from turnwise.opponents.seating import seat, seat_script, two_sided
from turnwise.renderers import get_renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.assemble import make_renderer
from turnwise.training.checkpoint import choose_checkpoint
from turnwise.training.evaluate import metric_word
from turnwise.trajectory import TrajectoryGroup

ADAPTER_FILE = "adapter_config.json"
BASE, SELF, POOL = "base", "self", "pool"
TINKER_PREFIX = "tinker+"
Kind = Literal["script", "base", "self", "pool", "checkpoint", "model", "address", "tinker"]
Report = Callable[[str], None]
AnyService = ServiceClient | RemoteServiceClient


@dataclass(frozen=True, slots=True, kw_only=True)
class OpponentSource:
    """What the words of an option mean."""

    kind: Kind
    words: str
    files: Path | None = None
    """The files of a checkpoint, or the directory of a model."""
    base: Path | None = None
    """The directory of its base model, where that is known."""


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
        return OpponentSource(kind="checkpoint", words=words, files=files, base=base)
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
    return path if (path / INFO_FILE).is_file() or (path / ADAPTER_FILE).is_file() else None


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


class Opponents:
    """Everybody who plays the other seat in a run or an evaluation. Close it, or use it in a with statement."""

    def __init__(
        self, config: Config, world: World, service: AnyService, rollout: RolloutConfig, report: Report = print
    ) -> None:
        """Load nothing yet.

        Args:
            service: Makes the clients of the policy's own base model.
            rollout: With the bounds of world and model filled in.
        """
        sided = two_sided(world)
        assert sided is not None, "opponents are for a world with two sides"
        self._config, self._world, self._sided = config, world, sided
        self._service, self._rollout, self._report = service, rollout, report
        self._stack = ExitStack()
        self._made: dict[str, Opponent] = {}
        self._services: dict[str, AnyService] = {}
        self._newest: NewestSampler | None = None
        self.pool: OpponentPool | None = None

    def open(self) -> None:
        """Load every model that the run needs. What another base model takes is taken before the policy's engine."""
        words = [self._sided.opponent, *self.panel]
        sources = [find_source(one, self._sided) for one in dict.fromkeys(words)]
        for source in sorted(sources, key=lambda source: not self._is_other_base(source)):
            if source.kind not in ("script", SELF, POOL):
                self._made[source.words] = self._make(source)
        if self._sided.opponent == POOL:
            if self._config.opponent.base_weight and BASE not in self._made:
                self._made[BASE] = self._make(OpponentSource(kind="base", words=BASE))
            self.pool = OpponentPool(
                config=self._config.opponent,
                base=self._made.get(BASE) if self._config.opponent.base_weight else None,
                scripts=self._sided.scripted_opponents if self._config.opponent.scripted_weight else (),
                make_script=lambda name, task: ScriptedOpponent(self._sided, name, task),
            )

    def player(self, words: str) -> Opponent | None:
        """The opponent that these words name, loaded; None if it is a script of the world."""
        source = find_source(words, self._sided)
        if source.kind == "script":
            return None
        if words not in self._made:
            self._made[words] = self._make(source)
        return self._made[words]

    @property
    def panel(self) -> tuple[str, ...]:
        """The opponents of an evaluation."""
        return panel_of(self._config, self._sided)

    @property
    def world(self) -> World:
        """The world, with the opponent of training."""
        return self.world_against(self._sided.opponent)

    def world_against(self, words: str) -> World:
        """The world, with one opponent."""
        if words in self._sided.scripted_opponents:
            return seat_script(self._world, words)
        return seat(self._world, lambda task, seed: self._choose(words, task, seed), self._config.opponent.deadline_s)

    def panel_worlds(self) -> dict[str, World]:
        """The worlds of an evaluation, by opponent."""
        return {words: self.world_against(words) for words in self.panel}

    def follow(self, sampler: VersionedSampler) -> None:
        """Take the policy's newest weights, for opponent=self."""
        if self._newest is None:
            self._newest = NewestSampler(sampler.client, sampler.version)
            self._made[SELF] = self._as_opponent(SELF, self._newest)
        self._newest.follow(sampler)

    async def before_first_step(self, trainer: TrainingClient) -> None:
        """Let the policy join the pool as training begins with it, unless it is the base model, which is there."""
        is_base = not (self._config.warmup.steps or self._config.model.start_from)
        if self.pool is not None and not self.pool.snapshots and not (is_base and self.pool.base is not None):
            await self.after_step(trainer, 0)

    async def after_step(self, trainer: TrainingClient, step: int) -> None:
        """Let a snapshot join the pool, if it is time."""
        if self.pool is None or step % self._config.opponent.snapshot_every:
            return
        saved = await trainer.save_weights_for_sampler(f"{SNAPSHOT_FILES}{step:06d}")
        sampler = await self._service.create_sampling_client_async(model_path=saved.path)
        name = f"snapshot_{step}"
        self.pool.add_snapshot(name, self._as_opponent(name, sampler), saved.path)

    def count(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Take the games of a step into the ratings; the metrics of the step, by opponent."""
        rewards: dict[str, list[float]] = {}
        results: dict[str, list[str]] = {}
        for one in (one for group in groups for one in group.trajectories if "opponent" in one.labels):
            rewards.setdefault(one.labels["opponent"], []).append(one.total_reward)
            if RESULT in one.labels:  # the game came to its end
                results.setdefault(one.labels["opponent"], []).append(one.labels[RESULT])
        if self.pool is not None:
            self.pool.record(results)
        found = _collapse_metrics(groups, rewards)
        for name, own in rewards.items():
            found[f"opponent/reward_{metric_word(name)}_mean"] = sum(own) / len(own)
            found[f"opponent/attempts_{metric_word(name)}"] = float(len(own))
        ratings = {} if self.pool is None else self.pool.ratings()
        return found | {f"opponent/elo_{metric_word(name)}": elo for name, elo in ratings.items()}

    def let_go(self, kept: Sequence[PoolState]) -> list[str]:
        """The paths of snapshots whose files nobody needs any more."""
        if self.pool is None or self._config.opponent.keep_files == "all":
            return []
        return self.pool.let_go(kept)

    def to_state(self) -> PoolState | None:
        return None if self.pool is None else self.pool.to_state()

    def restore(self, state: PoolState) -> list[str]:
        """Bring back the snapshots of a checkpoint. Those whose files are gone are left out; the answer names them."""
        assert self.pool is not None, "only a pool has a state"
        self.pool.results = {name: dict(against) for name, against in state.get("results", {}).items()}
        lost: list[str] = []
        for name, path in state["snapshots"].items():
            try:
                sampler = self._service.create_sampling_client(model_path=path)
            except (CheckpointError, ModelError, ServiceError) as error:
                lost.append(f"opponent {name} is left out of the pool: {error}")
                continue
            self.pool.add_snapshot(name, self._as_opponent(name, sampler), path)
        self.pool.newest = state.get("newest", self.pool.newest)
        return lost

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Opponents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose(self, words: str, task: Task, seed: int) -> Opponent:
        if words == POOL:
            assert self.pool is not None, "the pool was opened"
            return self.pool.draw(task, seed)
        if words not in self._made:
            raise ConfigError(f"opponent={words} was not loaded; call open(), and follow(sampler) for self")
        return self._made[words]

    def _is_other_base(self, source: OpponentSource) -> bool:
        if source.base is None or isinstance(self._service, RemoteServiceClient):
            return source.kind == "model"
        own = model_store.resolve_model(self._config.model.alias or self._config.model.name).directory
        return source.base.resolve() != own.resolve()

    def _make(self, source: OpponentSource) -> Opponent:
        config = self._config.opponent
        match source.kind:
            case "address":
                key = _read_key(config.api_key_variable)
                model = AddressModel(
                    base_url=source.words,
                    model=config.model,
                    api_key=key,
                    temperature=config.temperature,
                    max_tokens=self._max_tokens,
                    timeout_s=config.deadline_s,
                )
                return AddressOpponent(name=source.words, model=model)
            case "tinker":
                return self._as_opponent(source.words, self._tinker_sampler(source))
            case "base":
                return self._as_opponent(BASE, self._service.create_sampling_client(base_model=self._config.model.name))
            case "checkpoint":
                service = self._service_of(source)
                sampler = service.create_sampling_client(model_path=str(source.files))
                return self._as_opponent(source.words, sampler, self._context_of(source))
            case _:
                service = self._service_of(source)
                name = self._config.model.name if service is self._service else source.words
                sampler = service.create_sampling_client(base_model=name)
                return self._as_opponent(source.words, sampler, self._context_of(source))

    def _service_of(self, source: OpponentSource) -> AnyService:
        """The run's own service for weights of the policy's base model; for another one, a service of its own."""
        if not self._is_other_base(source):
            return self._service
        if "other" not in self._services:
            config, engine = self._config.opponent, self._config.engine_in_use
            update = {"kv_cache_gib": config.kv_cache_gib, "merge_adapter": "never", "context_length": 0}
            update |= {"device": config.device} if config.device else {}
            self._services["other"] = service = ServiceClient(engine=engine.model_copy(update=update))
            self._stack.callback(service.close)
        return self._services["other"]

    def _context_of(self, source: OpponentSource) -> int:
        """The context of another base model, which `engine.context_length` does not change; 0 for the policy's own."""
        if source.base is None or not self._is_other_base(source):
            return 0
        return read_facts(source.base, runs_here=True).context_length

    def _tinker_sampler(self, source: OpponentSource) -> SamplingClient:
        address, config = source.words.removeprefix(TINKER_PREFIX), self._config.opponent
        service = RemoteServiceClient(address, api_key=_read_key(config.api_key_variable) or None)
        self._stack.callback(service.close)
        is_path = config.model.startswith(SCHEMES)
        if is_path:
            return service.create_sampling_client(model_path=config.model)
        return service.create_sampling_client(base_model=config.model)

    @property
    def _max_tokens(self) -> int:
        return self._config.opponent.max_tokens or self._rollout.max_tokens_per_turn

    def _as_opponent(self, name: str, sampler: SamplingClient, context_length: int = 0) -> SamplerOpponent:
        """`context_length`: that of the opponent's own model; 0: it is the policy's."""
        tokenizer, rollout = sampler.get_tokenizer(), self._rollout
        is_own = name in (BASE, SELF) or name.startswith("snapshot_")
        return SamplerOpponent(
            name=name,
            sampler=sampler,
            renderer=make_renderer(tokenizer, rollout) if is_own else get_renderer(tokenizer),
            temperature=self._config.opponent.temperature,
            max_tokens=self._max_tokens,
            context_length=context_length or rollout.max_trajectory_tokens,
        )


def _collapse_metrics(groups: Sequence[TrajectoryGroup], rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """What shows that play between models goes wrong: one opening for all games, or a policy that only beats itself."""
    openings = [one.turns[0].reply.content for group in groups for one in group.trajectories]
    found = {"opponent/opening_diversity": len(set(openings)) / len(openings)} if openings else {}
    own = [value for name, values in rewards.items() if name.startswith("snapshot_") for value in values]
    others = [value for name, values in rewards.items() if not name.startswith("snapshot_") for value in values]
    if own and others:
        found["opponent/exploitation"] = sum(own) / len(own) - sum(others) / len(others)
    return found


def needs_opponents(config: Config, world: World) -> bool:
    """Whether somebody other than the world's own script plays, in training or in evaluations."""
    sided = two_sided(world)
    return sided is not None and (
        sided.opponent not in sided.scripted_opponents or panel_of(config, sided) != (sided.opponent,)
    )


def other_facts(config: Config, world: World) -> dict[str, ModelFacts]:
    """The sizes of every other base model that is loaded beside the policy's, for the memory plan."""
    sided = two_sided(world)
    if sided is None or config.model.base_url:
        return {}
    own = model_store.resolve_model(config.model.alias or config.model.name).directory
    found: dict[str, ModelFacts] = {}
    for words in dict.fromkeys((sided.opponent, *panel_of(config, sided))):
        source = find_source(words, sided)
        if source.base is not None and source.base.resolve() != own.resolve():
            found[words] = read_facts(source.base, runs_here=True)
    return found


def opponent_line(config: Config, world: World) -> list[str]:
    """Lines of the plan: who plays the other seat, who plays in evaluations, and what another base model takes."""
    sided = two_sided(world)
    if sided is None or not needs_opponents(config, world):
        return []
    lines = [f"opponent     {sided.opponent}; in evaluations: {', '.join(panel_of(config, sided))}"]
    for words, facts in other_facts(config, world).items():
        weights = facts.num_parameters * find_device(config.engine_in_use).dtype_bytes
        cache = f"KV cache {config.opponent.kv_cache_gib:.2f} GiB"
        lines.append(f"             {words} is loaded beside the policy: weights {format_bytes(weights)}, {cache}")
    return lines


def _read_key(variable: str) -> str:
    if not variable:
        return ""
    if not os.environ.get(variable):
        raise ConfigError(f"the environment variable {variable} is not set; export the opponent's key in it")
    return os.environ[variable]
