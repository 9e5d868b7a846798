"""`turnwise train`: a config to a run directory. The one place where a run's clients are made."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from turnwise.client.local import ServiceClient
from turnwise.config.config import Config, check_backend
from turnwise.config.files import (
    config_from_yaml,
    config_to_tree,
    config_to_yaml,
    left_out,
    load_config,
    override_config,
)
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import find_device
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.judges import attach_judge
from turnwise.methods.ppo import make_gae
from turnwise.models import store as model_store
from turnwise.models.facts import ModelFacts, read_facts
from turnwise.renderers.base import Renderer
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import CheckpointRow, EvaluationRow
from turnwise.runlog.writer import RunWriter
from turnwise.runtime.process import settled_process
from turnwise.training.assemble import Parts, assemble, critic_rate, make_optim, make_renderer
from turnwise.training.checkpoint import (
    NOTHING_DONE,
    Checkpoints,
    best_evaluation,
    last_checkpoint,
    remove_orphans,
    saved_critic,
)
from turnwise.training.critic import Critic
from turnwise.training.loop import Loop
from turnwise.training.plan import make_plan, plan_lines
from turnwise.training.record import Recorder
from turnwise.training.remote import AnyService, connect, delete_checkpoint
from turnwise.training.resume_checks import check_critic, check_overrides
from turnwise.training.run_state import RunState, read_state
from turnwise.training.stored import check_stored_data
from turnwise.training.tokens import num_taken_tokens
from turnwise.watch.heartbeat import Pulse
from turnwise.watch.interrupt import Interrupt, Interrupted
from turnwise.watch.loggers import check_loggers, open_loggers
from turnwise.watch.report import report_lines
from turnwise.watch.status import run_lock
from turnwise.watch.steer import Steering
from turnwise.watch.terminal import format_duration, open_view
from turnwise.watch.watchdog import EXIT_STALLED, StalledError, Watchdog

EXIT_INTERRUPTED = 130
K2_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a run begins: at nothing, or at a checkpoint."""

    config: Config
    directory: Path
    done: CheckpointRow
    evaluated: frozenset[tuple[str, int]]
    checkpoints: tuple[CheckpointRow, ...]
    is_new: bool
    num_drawn: int = 0
    """Tokens that the steps and the critic's pre-training took so far."""
    num_drawn_before: int = 0
    """Those that the critic's pre-training took."""
    critic_batches: int = 0
    """Of the critic's pre-training, that the checkpoint has."""
    state: RunState | None = None
    """Where the parts of the loop stood."""
    best: EvaluationRow | None = None
    """The evaluation whose checkpoint is kept beside the latest."""
    notes: tuple[str, ...] = ()
    """What the overrides left no reader for, in words."""


def train(name: str | None, overrides: Sequence[str], *, only_plan: bool, resume: str | None) -> int:
    """Run the command; returns the exit code."""
    start = _start_new(name, overrides) if resume is None else _start_again(Path(resume), overrides)
    config = start.config
    check_backend(config.generator)
    check_loggers(config.run.loggers)
    facts = find_facts(config)
    parts = assemble(config, facts)
    check_stored_data(parts)
    for line in _plan_lines(start, facts, parts):
        print(line, flush=True)
    if only_plan:
        return 0
    if start.is_new and is_run(start.directory):
        raise ConfigError(
            f"{start.directory} holds a run already; go on with it: turnwise train --resume {start.directory}, "
            "or choose another run.dir"
        )
    return _train(start, parts)


def read_config(name: str, overrides: Sequence[str]) -> Config:
    """`load_config`, with a pair of options that is not supported told like any other mistake."""
    try:
        return load_config(name, overrides)
    except NotImplementedError as cause:
        raise ConfigError(f"NotImplementedError: {cause}") from cause


def find_model(config: Config) -> Path:
    """The directory of the model, or of the one that stands in for it."""
    return model_store.resolve_model(config.model.alias or config.model.name, report=_say).directory


def find_facts(config: Config) -> ModelFacts:
    """Its sizes; a model that our engine cannot run is refused, unless a service elsewhere runs it."""
    return read_facts(find_model(config), runs_here=not config.model.base_url)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_engine_config(config: Config) -> EngineConfig:
    return EngineConfig(
        device=config.model.device,
        dtype=config.model.dtype,
        max_num_seqs=1 if config.generator.deterministic else config.generator.max_num_seqs,
        prefix_cache=not config.generator.deterministic,
        gpu_memory_utilization=config.generator.gpu_memory_utilization,
        micro_batch_tokens=config.train.micro_batch_tokens,
        seed=config.train.seed,
    )


def make_service(config: Config, data_dir: Path | None) -> AnyService:
    """The in-process service, which keeps checkpoints under `data_dir`; or the one at `model.base_url`."""
    if config.model.base_url:
        return connect(config, find_model(config))
    aliases = {config.model.name: config.model.alias} if config.model.alias else {}
    return ServiceClient(data_dir=data_dir, engine=make_engine_config(config), aliases=aliases)


def _named_world(overrides: Sequence[str]) -> str | None:
    """The world that `env=NAME` names, where no preset, file or world was given."""
    pairs = [text.partition("=") for text in overrides]
    return next((value for key, _, value in reversed(pairs) if key in ("env", "env.name") and value), None)


def _start_new(name: str | None, overrides: Sequence[str]) -> _Start:
    name = name or _named_world(overrides)
    if name is None:
        raise ConfigError("nothing to train; expected turnwise train NAME|FILE, env=WORLD, or --resume RUN")
    config = read_config(name, overrides)
    run_name = config.run.name or _default_name(config)
    directory = Path(config.run.dir).expanduser() if config.run.dir else Path("runs") / run_name
    named = config.run.model_copy(update={"name": run_name, "dir": str(directory)})
    return _Start(
        config=config.model_copy(update={"run": named}),
        directory=directory,
        done=NOTHING_DONE,
        evaluated=frozenset(),
        checkpoints=(),
        is_new=True,
        notes=tuple(left_out(name, overrides)),
    )


def _start_again(directory: Path, overrides: Sequence[str]) -> _Start:
    with RunReader(directory) as run:
        stored = config_from_yaml(run.config_yaml, str(run.directory))
        check_overrides(stored, overrides)
        config = override_config(stored, overrides)
        done = last_checkpoint(run) if run.checkpoints() else NOTHING_DONE
        critic = saved_critic(run.directory, done) if done.path else None
        check_critic(stored, config, num_steps_done=done.step, has_critic=critic is not None)
        critic_batches = critic.num_pretrained if critic is not None else 0
        state = read_state(done, run.pool(done.step), tasks_per_step=config.train.tasks_per_step)
        rows = [row for row in run.evaluations() if row.step <= done.step]
        return _Start(
            config=config,
            directory=run.directory,
            done=done,
            evaluated=frozenset((row.label, row.step) for row in rows),
            checkpoints=tuple(row for row in run.checkpoints() if row.step <= done.step),
            is_new=False,
            num_drawn=num_taken_tokens(run, done.step, critic_batches=critic_batches),
            num_drawn_before=num_taken_tokens(run, 0, critic_batches=critic_batches),
            critic_batches=critic_batches,
            state=state,
            best=best_evaluation(run, done.step) if config.eval.keep_best else None,
            notes=tuple(left_out(stored, overrides)),
        )


def _default_name(config: Config) -> str:
    world, model = (Path(name).name.replace(":", "-") for name in (config.env.name, config.model.name))
    return f"{world}-{model}-{time.strftime('%Y%m%d-%H%M%S')}"


def _plan_lines(start: _Start, facts: ModelFacts, parts: Parts) -> list[str]:
    engine = make_engine_config(start.config)
    plan = make_plan(
        start.config,
        facts,
        parts.rollout.limits,
        engine=engine,
        device=None if start.config.model.base_url else find_device(engine),
        num_train_tasks=len(parts.tasks),
        num_test_tasks=len(parts.held_out),
    )
    lines = plan_lines(start.config, facts, plan, parts.rollout.limits, str(start.directory))
    lines += [f"note         {note}" for note in start.notes]
    if start.is_new:
        return lines
    warmup = f" and {start.done.warmup_steps} warm-up steps" if start.done.warmup_steps else ""
    num_waiting = len(start.state.pool) if start.state is not None else 0
    pool = f", with {num_waiting} groups in the pool" if num_waiting else ""
    return [*lines, f"resume       after {start.done.step} steps{warmup}{pool}"]


def _train(start: _Start, parts: Parts) -> int:
    with run_lock(start.directory):
        return _train_alone(start, parts)


def _train_alone(start: _Start, parts: Parts) -> int:
    config, directory = start.config, start.directory
    loggers = open_loggers(config, directory, config.run.name, config_to_tree(config))  # one that fails leaves no run
    if start.is_new:
        writer = RunWriter.create(directory, config_to_yaml(config), max_size_mb=config.run.max_size_mb)
    else:
        writer = RunWriter.reopen(directory, max_size_mb=config.run.max_size_mb)
        writer.set_meta("config", config_to_yaml(config))
        done = start.done
        writer.forget_after(done.step, warmup_steps=done.warmup_steps, critic_batches=start.critic_batches)
        writer.event(start.done.step, "resumed", path=start.done.path)
        writer.commit(start.done.step)
        remove_orphans(directory, start.checkpoints)
    recorder = Recorder(writer, open_view(config.train.steps), loggers, num_steps=config.train.steps)
    started_s = time.monotonic()
    try:
        with make_service(config, directory) as service:
            attach_judge(parts.world, service)
            try:
                asyncio.run(_run_loop(start, parts, service, recorder))
            except StalledError as error:
                _leave_if_stuck(error, recorder, start.done.step)
                raise
    except Interrupted:
        recorder.view.say(f"saved; go on with: turnwise train --resume {directory}")
        return EXIT_INTERRUPTED
    except TurnwiseError as error:
        writer.event(start.done.step, "failed", error=str(error))
        raise
    finally:
        recorder.close()
    print(f"done in {format_duration(time.monotonic() - started_s)}")
    with RunReader(directory) as run:
        title = f"{config.env.name}, {config.model.alias or config.model.name}, {config.method.name}"
        print("\n".join(report_lines(run, title=title, num_dialogues=config.run.dialogues)))
    return 0


async def _run_loop(start: _Start, parts: Parts, service: AnyService, recorder: Recorder) -> None:
    config, model = start.config, start.config.model
    interrupt = Interrupt()
    with interrupt.on_signals(recorder.view.say):
        recorder.phase("loading the model")
        if start.done.path:
            trainer = await service.create_training_client_from_state_with_optimizer_async(start.done.path)
        else:
            trainer = await service.create_lora_training_client_async(
                model.name,
                rank=model.rank,
                seed=derive_seed(config.train.seed, "adapter"),
                train_mlp=model.train_mlp,
                train_attn=model.train_attn,
                train_unembed=model.train_unembed,
            )
        renderer = make_renderer(trainer.get_tokenizer(), config.generator)
        critic = await _make_critic(start, parts, service, renderer) if parts.needs_critic else None
        checkpoints = Checkpoints(
            *(trainer, recorder.writer, list(start.checkpoints)),
            max_kept=config.train.keep_checkpoints,
            critic=critic,
            delete=partial(delete_checkpoint, service),
            best=start.best,
        )
        tolerance = K2_TOLERANCE[_dtype_name(config)]
        train, steering = config.train, Steering()
        watchdog = Watchdog(call_deadline_s=train.call_deadline_s, stall_deadline_s=train.stall_deadline_s)
        loop = Loop(
            *(parts, trainer, renderer, recorder, checkpoints, interrupt),
            critic=critic,
            k2_tolerance=tolerance,
            watchdog=watchdog,
            steering=steering,
        )
        pulse = Pulse(
            *(start.directory, loop, recorder, interrupt, watchdog, steering),
            block_deadline_s=train.call_deadline_s,
        )
        with settled_process():
            async with pulse:
                await loop.run(
                    *(start.done, set(start.evaluated), start.num_drawn, start.state),
                    num_drawn_before=start.num_drawn_before,
                )


def _leave_if_stuck(error: StalledError, recorder: Recorder, step: int) -> None:
    """An engine that does not answer would not let us close it either: leave without asking."""
    if error.party not in ("trainer", "critic"):
        return
    recorder.writer.event(step, "failed", error=str(error))
    recorder.close()
    print(f"turnwise: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_STALLED)


async def _make_critic(start: _Start, parts: Parts, service: AnyService, renderer: Renderer) -> Critic:
    """A new critic, or the one that was saved with the policy."""
    config, model = start.config, start.config.model
    saved = saved_critic(start.directory, start.done) if start.done.path else None
    if saved is not None:
        client = await service.create_training_client_from_state_with_optimizer_async(saved.path)
    else:
        client = await service.create_critic_training_client_async(
            model.name,
            rank=config.critic.rank or model.rank,
            seed=derive_seed(config.train.seed, "critic"),
            train_mlp=model.train_mlp or not model.train_attn,
            train_attn=model.train_attn,
        )
    critic = Critic(
        *(client, config.critic, make_gae(config.method)),
        make_optim(config, critic_rate(config)),
        renderer,
        max_tokens=parts.rollout.limits.max_trajectory_tokens,
        num_pretrained=saved.num_pretrained if saved is not None else 0,
    )
    if saved is not None and saved.plateau is not None:
        critic.plateau.restore(saved.plateau)
    return critic


def _dtype_name(config: Config) -> str:
    if config.model.base_url:  # it does not say; most train in bfloat16
        return "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    from turnwise.engine.engine import choose_device  # torch, which is loaded by now

    _, dtype = choose_device(EngineConfig(device=config.model.device, dtype=config.model.dtype))
    return str(dtype).removeprefix("torch.")
