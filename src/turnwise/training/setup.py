"""From a config, or a run directory, to everything that a run needs before its first client is made.

    config or directory -> Start (where the run begins) -> facts of the model -> Parts (world, tasks, method) -> Setup

Nothing here is spent: no weights are loaded, and no file is written before `claim_directory`. A mistake is a
`ConfigError`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from turnwise.backends import find_publisher
from turnwise.backends.servers.gpus import check_server_fits, choose_server_gpus
from turnwise.client.local import ServiceClient
from turnwise.client.remote import RemoteServiceClient
from turnwise.client.remote_connection import probe
from turnwise.config.config import Config
from turnwise.config.files import SHORT_KEYS, config_from_yaml, left_out, load_config, override_config
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo, find_device, share_among_engines
from turnwise.engine.machine_share import count_here
from turnwise.envs.registry import load_target
from turnwise.envs.worlds import check_options, world_parameters
from turnwise.errors import ConfigError, NotSupportedError
from turnwise.models import store as model_store
from turnwise.models.facts import ModelFacts, read_facts
from turnwise.rollout.config import RolloutConfig
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.assemble import Parts, assemble
from turnwise.training.checkpoint import (
    NEW_RUN,
    NOTHING_DONE,
    Start,
    best_evaluation,
    last_checkpoint,
    read_state,
    saved_critic,
)
from turnwise.training.objects import NO_OBJECTS, PythonObjects, check_objects, logger_notes
from turnwise.training.opponent_words import check_opponents, check_panel_stays, num_panel, opponent_line, other_bytes
from turnwise.training.plan import Plan, make_plan, plan_lines
from turnwise.training.progress import num_taken_tokens
from turnwise.training.start_from import resolve_start
from turnwise.training.stored import check_stored_data
from turnwise.training.trainer_engine import trainer_engine
from turnwise.training.weight_transfer import choose_weight_transfer
from turnwise.training.workers import worker_line
from turnwise.watch.loggers import check_loggers
from turnwise.watch.status import check_can_hold, is_training, run_lock

AnyService = ServiceClient | RemoteServiceClient
Report = Callable[[str], None]
"""Takes one line about what goes on, such as a download."""

FIXED_SECTIONS = ("model", "env", "memory", "warmup")
"""A resumed run keeps them: its weights and its tasks depend on them."""
FIXED_OPTIONS = ("engine.device", "engine.dtype")
"""A resumed run keeps these too: its numbers depend on them."""


def report_nothing(line: str) -> None:
    """The `Report` of a caller who wants to hear nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run that can begin."""

    config: Config
    directory: Path
    start: Start
    facts: ModelFacts
    parts: Parts
    objects: PythonObjects = NO_OBJECTS
    notes: Sequence[str] = field(default_factory=tuple[str, ...])
    """What the overrides left no reader for, in words."""
    default_name: str = ""
    """What the run is called after where the user chose neither a name nor a directory; empty: the user did."""
    card: DeviceInfo | None = None
    """What every engine has in place of this machine's device, where the plan is for other machines."""

    def renamed(self) -> Setup:
        """The same run in the next directory that is free, for one that the user gave no name."""
        name = _next_free(self.default_name)
        directory = Path("runs") / name
        run = self.config.run.model_copy(update={"name": name, "dir": str(directory)})
        config = self.config.model_copy(update={"run": run})
        note = f"another run took {self.directory}; this one is kept in {directory}"
        parts = replace(self.parts, config=config)
        return replace(self, config=config, parts=parts, directory=directory, notes=(*self.notes, note))

    @property
    def trainer_engine(self) -> EngineConfig:
        """The engine of the first learner."""
        return trainer_engine(self.config, self.parts.world)

    def make_plan(self, engine: EngineConfig | None = None) -> Plan:
        """What the run will do and cost, in numbers.

        Args:
            engine: whose memory the plan tells; None: that of the first learner.
        """
        engine, cluster = engine or self.trainer_engine, self.config.cluster
        plan = make_plan(
            self.config,
            self.facts,
            self.parts.rollout,
            engine=engine,
            device=None if self.config.model.base_url else self._find_device(engine),
            num_tasks={
                "train": len(self.parts.tasks),
                "test": len(self.parts.held_out),
                "opponents": num_panel(self.config, self.parts.world),
            },
        )
        if plan.memory is not None and plan.memory.device.facts.has_own_memory and self.card is None:
            whole = find_device(engine).total_bytes
            check_server_fits(engine, cluster, self.parts.rollout, needed=plan.memory.num_needed, total=whole)
        return plan

    def _server_gpus(self, rollout: RolloutConfig) -> tuple[int, ...]:
        """GPUs of this machine that a server of the run's own gets."""
        if self.config.model.base_url or self.card is not None:
            return ()
        return choose_server_gpus(self.trainer_engine, self.config.cluster, rollout)

    def _find_device(self, engine: EngineConfig) -> DeviceInfo:
        """An engine's device, or the card of the plan, with what opponents take of it."""
        cluster, device = self.config.cluster, self.card
        if device is None:
            device = share_among_engines(find_device(engine), count_here(cluster.num_devices, cluster))
        return replace(device, reserved_bytes=other_bytes(self.config, self.parts.world, device))

    def plan_lines(self) -> list[str]:
        """What the run will do and cost, for a person."""
        plan, rollout = self.make_plan(), self.parts.rollout
        lines = plan_lines(self.config, self.facts, plan, rollout, str(self.directory))
        if rollout.backend != "local":
            server = find_publisher(rollout.backend).describe(rollout)
            gpus = ", ".join(f"cuda:{gpu}" for gpu in self._server_gpus(rollout))
            lines.insert(-1, f"server       {server}{gpus and f' (on {gpus})'}")
        if rollout.publish == "weights":
            lines.insert(-1, f"publish      whole weights, by {choose_weight_transfer(self.config, self.facts)}")
        lines += opponent_line(self.config, self.parts.world)
        lines += worker_line(self.config, self.parts.world)
        lines += [f"note         {note}" for note in self.notes]
        if self.start.is_new:
            return lines
        done, state = self.start.done, self.start.state
        warmup = f" and {done.warmup_steps} warm-up steps" if done.warmup_steps else ""
        num_waiting = len(state.pool) if state is not None else 0
        pool = f", with {num_waiting} groups in the pool" if num_waiting else ""
        return [*lines, f"resume       after {done.step} steps{warmup}{pool}"]


def set_up_new(
    config: Config,
    objects: PythonObjects = NO_OBJECTS,
    *,
    notes: Sequence[str] = (),
    report: Report = report_nothing,
) -> Setup:
    """A run from its first step on."""
    config = resolve_start(config)
    default_name = _default_name(config)
    run_name = config.run.name or (default_name if config.run.dir else _next_free(default_name))
    directory = Path(config.run.dir).expanduser() if config.run.dir else Path("runs") / run_name
    named = config.run.model_copy(update={"name": run_name, "dir": str(directory)})
    is_named = bool(config.run.name or config.run.dir)
    setup = _set_up(config.model_copy(update={"run": named}), directory, NEW_RUN, objects, notes, report)
    return setup if is_named else replace(setup, default_name=default_name)


def set_up_resume(
    directory: Path,
    overrides: Sequence[str] = (),
    objects: PythonObjects = NO_OBJECTS,
    *,
    report: Report = report_nothing,
) -> Setup:
    """A run from its latest checkpoint on."""
    with RunReader(directory) as run:
        check_objects(run, objects)
        notes = logger_notes(run, objects)
        stored = config_from_yaml(run.config_yaml, str(run.directory))
        check_overrides(stored, overrides)
        config = override_config(stored, overrides)
        done = last_checkpoint(run) if run.checkpoints() else NOTHING_DONE
        critic = saved_critic(run.directory, done) if done.path else None
        check_critic(stored, config, num_steps_done=done.step, has_critic=critic is not None)
        critic_batches = critic.num_pretrained if critic is not None else 0
        rows = [row for row in run.evaluations() if row.step <= done.step]
        start = Start(
            done=done,
            evaluated=frozenset((row.label, row.step) for row in rows),
            checkpoints=tuple(row for row in run.checkpoints() if row.step <= done.step),
            is_new=False,
            num_drawn=num_taken_tokens(run, done.step, critic_batches=critic_batches),
            num_drawn_before=num_taken_tokens(run, 0, critic_batches=critic_batches),
            critic_batches=critic_batches,
            state=read_state(done, run.pool(done.step), tasks_per_step=config.train.tasks_per_step),
            best=best_evaluation(run, done.step) if config.eval.keep_best else None,
        )
        directory = run.directory
    return _set_up(config, directory, start, objects, [*left_out(stored, overrides), *notes], report)


def _set_up(
    config: Config, directory: Path, start: Start, objects: PythonObjects, notes: Sequence[str], report: Report
) -> Setup:
    if start.is_new:
        check_can_hold(directory)
    if config.model.base_url:
        probe(config.model.base_url)
    publisher = find_publisher(config.rollout.backend)
    if config.model.train == "full" and not publisher.takes_full_weights:
        raise ConfigError(
            f"rollout.backend={config.rollout.backend} samples from adapters only, and model.train=full trains all "
            "weights; use rollout.backend=local, or vllm or sglang with rollout.publish=weights. A backend of your own "
            "says takes_full_weights = True"
        )
    if config.rollout.placement == "colocated" and config.train.max_staleness:
        raise ConfigError(
            f"rollout.placement=colocated: the sampler sleeps while the trainer learns, and train.max_staleness="
            f"{config.train.max_staleness} samples meanwhile; set train.max_staleness=0, or rollout.placement=separate"
        )
    publisher.check_options(config.rollout)
    check_loggers(config.run.loggers)
    if objects.env is None:
        _check_worlds(config)
    facts = find_facts(config, report)
    if facts.has_other_angles and config.is_sampled_elsewhere:
        raise ConfigError(
            f"engine.context_length={config.engine.context_length} goes beyond the first angles of this model, and "
            f"the server of rollout.backend={config.rollout.backend} chooses angles by a rule of its own: its logprobs "
            "would be those of another model. Leave the option out, or use rollout.backend=local"
        )
    if facts.is_packed and config.is_sampled_elsewhere:
        raise ConfigError(
            f"{config.model.name} is published in MXFP4, which is multiplied out here, and the server of "
            f"rollout.backend={config.rollout.backend} would load it in four bits and cannot take trained weights. Use "
            "rollout.backend=local, or a copy of the model in bfloat16"
        )
    choose_weight_transfer(config, facts)
    parts = assemble(config, facts, objects)
    check_opponents(config, parts.world)
    check_panel_stays(config, parts.world)
    check_stored_data(parts)
    return Setup(
        config=config, directory=directory, start=start, facts=facts, parts=parts, objects=objects, notes=tuple(notes)
    )


def _check_worlds(config: Config) -> None:
    """Tell misspelt worlds and options of worlds before a model is looked for, which may be a download."""
    for world in config.env.mix.values() or (config.env,):
        target = load_target(world.name)
        parameters = world_parameters(target)
        if parameters is not None and not {*world.options} <= {parameter.name for parameter in parameters}:
            check_options(world.name, parameters, world.options)


def claim_directory(setup: Setup) -> tuple[Setup, ExitStack]:
    """Lock the directory of a run, for this process alone; closing the stack frees it.

    A run that the user gave no name goes to the next free directory when another one was faster.
    """
    while True:
        lock = ExitStack()
        try:
            _check_free(setup)
            lock.enter_context(run_lock(setup.directory))
            _check_free(setup)  # another process may have begun and ended a run in between
            return setup, lock
        except ConfigError:
            lock.close()
            is_taken = is_run(setup.directory) or is_training(setup.directory)
            if not setup.default_name or not is_taken:
                raise
            setup = setup.renamed()


def _check_free(setup: Setup) -> None:
    """Refuse to begin a new run where one is."""
    if setup.start.is_new and is_run(setup.directory):
        raise ConfigError(
            f"{setup.directory} holds a run already; go on with it: turnwise train --resume {setup.directory}, "
            "or choose another run.dir"
        )


def check_service(config: Config, service: AnyService | None) -> None:
    """Refuse a service elsewhere that the run's config does not name: the run's checkpoints are there."""
    if isinstance(service, RemoteServiceClient) and not config.model.base_url:
        raise ConfigError(
            f"service is at {service.base_url}, and model.base_url is empty; a run that is read or resumed later would "
            f"look for its checkpoints here. Pass model={{'name': {config.model.name!r}, 'base_url': "
            f"{service.base_url!r}}} too"
        )


def _default_name(config: Config) -> str:
    world, model = (Path(name).name.replace(":", "-") for name in (config.env.name, config.model.name))
    return f"{world}-{model}-{time.strftime('%Y%m%d-%H%M%S')}"


def _next_free(name: str) -> str:
    """The name, or the name with a number, under which there is no run yet."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    places = ((free, Path("runs") / free) for free in names)
    return next(free for free, place in places if not is_run(place) and not is_training(place))


def check_overrides(stored: Config, overrides: Sequence[str]) -> None:
    """Refuse another model, world, warm-up or method for a run that is resumed."""
    for text in overrides:
        key, _, value = (part.strip() for part in text.partition("="))
        if SHORT_KEYS.get(key, key).partition(".")[0] in FIXED_SECTIONS or key in FIXED_OPTIONS:
            raise ConfigError(f"{text}: a resumed run keeps its {', '.join(FIXED_SECTIONS)}; start a new one for that")
        if key in ("method", "method.name") and value != stored.method.name:
            raise ConfigError(
                f"{text}: a resumed run keeps its method, {stored.method.name}: the steps on record, the optimizer's "
                "state and a critic, which learns before the first step, belong to it; start a new run for another"
            )


def check_critic(stored: Config, config: Config, *, num_steps_done: int, has_critic: bool) -> None:
    """Refuse options of the critic that would come too late to be read."""
    for name in type(config.critic).model_fields:
        if getattr(config.critic, name) == getattr(stored.critic, name):
            continue
        if name.startswith("pretrain_") and num_steps_done:
            raise ConfigError(
                f"critic.{name} is not read any more: the critic learned alone before the first of the "
                f"{num_steps_done} steps that this run has done; leave it out, or start a new run"
            )
        if name == "rank" and has_critic:
            raise ConfigError("critic.rank: the run's critic is there and keeps its rank; start a new run for another")


def read_config(name: str, overrides: Sequence[str]) -> Config:
    """`load_config`, with a pair of options that is not supported told like any other mistake."""
    try:
        return load_config(name, overrides)
    except NotImplementedError as cause:
        raise NotSupportedError(f"NotImplementedError: {cause}") from cause


def find_model(config: Config, report: Report = report_nothing) -> Path:
    """The directory of the model, or of the one that stands in for it; fetched or made where it is not there."""
    return model_store.resolve_model(config.model.alias or config.model.name, report=report).directory


def find_facts(config: Config, report: Report = report_nothing) -> ModelFacts:
    """The model's sizes. A model that our engine cannot run is refused, unless a service elsewhere runs it."""
    runs_here = not config.model.base_url
    wanted = config.engine.context_length if runs_here else 0
    return read_facts(find_model(config, report), runs_here=runs_here, wanted_context=wanted)


def make_service(config: Config, data_dir: Path | None, engine: EngineConfig | None = None) -> AnyService:
    """The in-process service, which keeps checkpoints under `data_dir`; or the one at `model.base_url`.

    Args:
        engine: how the service runs models; None: as the config says, which is what one that samples needs.
    """
    if config.model.base_url:
        return RemoteServiceClient(
            config.model.base_url,
            tokenizer=find_model(config),
            user_metadata={"run": config.run.name},
            needs_critics=config.method.needs_critic,
        )
    aliases = {config.model.name: config.model.alias} if config.model.alias else {}
    engine = engine or config.engine_in_use
    return ServiceClient(data_dir=data_dir, engine=engine, cluster=config.cluster, aliases=aliases)
