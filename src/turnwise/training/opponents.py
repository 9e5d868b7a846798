"""The opponents of a run: from the words of `env.options.opponent` (`opponent_words.py`) to players.

Weights of the policy's own base model are sampled by the engine that trains, in the same batches. Another base model is
loaded beside it, before it, so that the engine plans with the memory that is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.checkpoints import SCHEMES
from turnwise.client.local import ServiceClient
from turnwise.client.publish import NewestSampler, VersionedSampler
from turnwise.client.remote import RemoteServiceClient
from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml
from turnwise.envs.base import Task, World
from turnwise.envs.seats import RESULT, WON_SHARES, Opponent, ScriptedOpponent
from turnwise.errors import CheckpointError, ConfigError, ModelError, ServiceError
from turnwise.judges.models import AddressModel
from turnwise.models import store as model_store
from turnwise.models.facts import read_facts
from turnwise.opponents.players import AddressOpponent, SamplerOpponent
from turnwise.opponents.pool import SNAPSHOT_FILES, OpponentPool, PoolState
from turnwise.opponents.seating import seat, seat_script, two_sided
from turnwise.renderers import get_renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.self_play import split_seats
from turnwise.runlog.reader import RunReader
from turnwise.training.assemble import make_renderer
from turnwise.training.evaluate import metric_word
from turnwise.training.opponent_words import BASE, POOL, SELF, TINKER_PREFIX, OpponentSource, find_source, panel_of
from turnwise.trajectory import TrajectoryGroup

Report = Callable[[str], None]
AnyService = ServiceClient | RemoteServiceClient


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
            self._made[SELF] = self._as_opponent(SELF, self._newest, self._rollout)
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
        self.pool.add_snapshot(name, self._as_opponent(name, sampler, self._rollout), saved.path)

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
        found = _collapse_metrics(groups)
        exploitation = None if self.pool is None else self.pool.exploitation()
        if exploitation is not None:
            found["opponent/exploitation"] = exploitation
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
            self.pool.add_snapshot(name, self._as_opponent(name, sampler, self._rollout), path)
        self.pool.newest = state.get("newest", self.pool.newest)
        return lost

    def check_pool(self, lost: Sequence[str], advice: str) -> None:
        """Refuse a pool without a member.

        Args:
            lost: What `restore` answered.
            advice: What the user can do.
        """
        if self.pool is not None and not self.pool.shares():
            why = "; ".join(lost) or "its snapshots come with a run that trained against it"
            raise ConfigError(f"opponent=pool has no member: {why}; {advice}")

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
                    asker="an opponent",
                )
                return AddressOpponent(name=source.words, model=model, deadline_s=config.deadline_s)
            case "tinker":
                return self._as_opponent(source.words, self._tinker_sampler(source))
            case "base":
                sampler = self._service.create_sampling_client(base_model=self._config.model.name)
                return self._as_opponent(BASE, sampler, self._rollout)
            case "checkpoint":
                sampler = self._service_of(source).create_sampling_client(model_path=str(source.files))
            case _:
                service = self._service_of(source)
                name = self._config.model.name if service is self._service else source.words
                sampler = service.create_sampling_client(base_model=name)
        return self._as_opponent(source.words, sampler, self._speech_of(source), self._context_of(source))

    def _speech_of(self, source: OpponentSource) -> RolloutConfig | None:
        """How weights were trained to speak: a run's as its config says, others of the policy's base model as the
        policy does; None for other models, whose tokenizer says it."""
        if source.run is not None:
            with RunReader(source.run) as run:
                return config_from_yaml(run.config_yaml, str(run.directory)).rollout
        return None if self._is_other_base(source) else self._rollout

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
        self._stack.callback(self._leave, service, address)
        is_path = config.model.startswith(SCHEMES)
        if is_path:
            return service.create_sampling_client(model_path=config.model)
        return service.create_sampling_client(base_model=config.model)

    def _leave(self, service: RemoteServiceClient, address: str) -> None:
        """End the session of an opponent. What was played stays, so a service that died is no error any more."""
        try:
            service.close()
        except (ServiceError, TimeoutError) as error:
            self._report(f"the session of the opponent at {address} was not ended: {error}")

    @property
    def _max_tokens(self) -> int:
        return self._config.opponent.max_tokens or self._rollout.max_tokens_per_turn

    def _as_opponent(
        self, name: str, sampler: SamplingClient, speech: RolloutConfig | None = None, context_length: int = 0
    ) -> SamplerOpponent:
        """A player with these weights.

        Args:
            speech: Its renderer and the strings that end its replies; None: those of its tokenizer.
            context_length: That of the opponent's own model; 0: it is the policy's.
        """
        tokenizer = sampler.get_tokenizer()
        return SamplerOpponent(
            name=name,
            sampler=sampler,
            renderer=get_renderer(tokenizer) if speech is None else make_renderer(tokenizer, speech),
            temperature=self._config.opponent.temperature,
            max_tokens=self._max_tokens,
            context_length=context_length or self._rollout.max_trajectory_tokens,
            stop=() if speech is None else speech.stop,
        )


def _collapse_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """What shows that play between models goes wrong: one opening for all games of a group, or one seat wins them all.

    Only attempts that share a start are compared, and 0 means that all of them begin alike, however many there are.
    """
    seats = [own for group in groups for own in split_seats(group) if not own.branch_turn]
    openings = [[one.turns[0].reply.content for one in own.trajectories] for own in seats]
    shares = [(len(set(said)) - 1) / (len(said) - 1) for said in openings if len(said) > 1]
    found = {"opponent/opening_diversity": sum(shares) / len(shares)} if shares else {}
    won: dict[str, list[float]] = {}
    for one in (one for own in seats for one in own.trajectories if "seat" in one.labels and RESULT in one.labels):
        won.setdefault(one.labels["seat"], []).append(WON_SHARES[one.labels[RESULT]])
    by_seat = [sum(own) / len(own) for own in won.values()]
    return found | ({"opponent/seat_gap": max(by_seat) - min(by_seat)} if len(by_seat) > 1 else {})


def _read_key(variable: str) -> str:
    if not variable:
        return ""
    if not os.environ.get(variable):
        raise ConfigError(f"the environment variable {variable} is not set; export the opponent's key in it")
    return os.environ[variable]
