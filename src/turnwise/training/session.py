"""One process's part of a run: from the lock on its directory to the last row in it.

`TrainingSession.claim` takes the directory, so that readers find a run there. `TrainingSession.run` makes what writes,
watches and trains, hands it to the loop, and closes everything at the end, however the loop ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Literal

from turnwise.backends import BackendSetup, make_publisher
from turnwise.client.base import TrainingClient
from turnwise.client.local import ServiceClient
from turnwise.config.config import Config
from turnwise.config.files import config_to_tree, config_to_yaml
from turnwise.errors import TurnwiseError
from turnwise.judges import attach_judge
from turnwise.models.config import expert_options
from turnwise.outcomes import attach_outcome_model
from turnwise.renderers.base import Renderer
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.writer import RunWriter
from turnwise.runtime import tolerances
from turnwise.runtime.process import settled_process
from turnwise.training.assemble import critic_rate, make_optim, make_renderer
from turnwise.training.checkpoint import RunCheckpoints, remove_orphans, remove_snapshots, saved_critic
from turnwise.training.critic import Critic
from turnwise.training.engine_learners import find_learners
from turnwise.training.heartbeat import Heartbeat
from turnwise.training.loop import Loop, LoopSetup
from turnwise.training.objects import META_KEY
from turnwise.training.opponent_words import needs_opponents
from turnwise.training.opponents import Opponents
from turnwise.training.record import Recorder
from turnwise.training.setup import AnyService, Setup, claim_directory, find_model, make_service
from turnwise.training.steer import Steering, take_orders
from turnwise.training.weight_transfer import choose_weight_transfer
from turnwise.training.workers import running_workers
from turnwise.watch.interrupt import Interrupt, Interrupted
from turnwise.watch.loggers import LoggerObserver, open_loggers
from turnwise.watch.observer import Observer
from turnwise.watch.watchdog import StalledError

ENGINE_PARTIES = ("trainer", "critic")
"""Parties behind which the engine stands: when one does not answer, closing the engine would not return either."""
Outcome = Literal["finished", "stopped"]
NO_MEMBER = (
    "bring the files back, or let others play: turnwise train --resume RUN opponent.base_weight=1, or "
    "opponent.scripted_weight=1"
)


class TrainingSession:
    """Trains one run in this process. `interrupt` and `steering` may be used from any thread while it does."""

    def __init__(
        self,
        setup: Setup,
        observers: Sequence[Observer] = (),
        service: AnyService | None = None,
        on_stuck: Callable[[StalledError], None] = lambda _: None,
    ) -> None:
        """Args:
        service: Makes the clients, and stays open; default: one that the config describes, for this session. The
            run's checkpoints are kept in the run's directory, wherever a service in this process keeps its own.
        on_stuck: Called in another thread when the event loop is blocked for so long that the session cannot end.
        """
        self.setup = setup
        self.interrupt = Interrupt()
        self.steering = Steering()
        self._observers = list(observers)
        self._service = service
        self._on_stuck = on_stuck
        self._lock = contextlib.ExitStack()
        self._loggers: list[Observer] = []

    def claim(self) -> None:
        """Lock the directory, start the loggers, and write what a reader of the run needs; comes before `run`."""
        self.setup, lock = claim_directory(self.setup)
        with lock:
            # Drop orders that were meant for an earlier process. Those that come from now on are for this one, also
            # while the model is being loaded.
            take_orders(self.setup.directory)
            self._loggers = self._open_loggers()  # first, because a logger that fails must not leave a run behind
            self._write_config()
            self._lock = lock.pop_all()

    def run(self) -> Outcome:
        """Train to the end, or until it is stopped; saves in both cases. Runs its own event loop."""
        config = self.setup.config
        with self._lock:
            writer = RunWriter.reopen(self.setup.directory, max_size_mb=config.run.max_size_mb)
            recorder = Recorder(writer, [*self._observers, *self._loggers], num_steps=config.train.steps)
            recorder.observers.on_error = self.interrupt.stop_with
            for note in self.setup.notes:
                recorder.observers.message(f"note: {note}")
            try:
                outcome = self._train(recorder)
            except TurnwiseError as error:
                recorder.writer.event(self.setup.start.done.step, "failed", error=str(error))
                raise
            finally:
                recorder.close()
        error = recorder.observers.error
        if error is not None and not self.interrupt.is_by_signal:
            error.outcome = outcome
            raise error
        return outcome

    def _train(self, recorder: Recorder) -> Outcome:
        try:
            with self._open_service() as service:
                attach_judge(self.setup.parts.world, service)
                attach_outcome_model(self.setup.parts.world, service)
                workers = running_workers(self.setup.parts.world, recorder.observers.message)
                with workers, self._open_opponents(service, recorder) as opponents:
                    asyncio.run(self._run_loop(service, recorder, opponents))
        except Interrupted:
            recorder.observers.message(f"saved; go on with: turnwise train --resume {self.setup.directory}")
            return "stopped"
        except asyncio.CancelledError:  # a hard stop of a session that has no signals to be stopped by
            return "stopped"
        return "finished"

    @contextlib.contextmanager
    def _open_service(self) -> Generator[AnyService]:
        if isinstance(self._service, ServiceClient):
            yield self._service.keeping_checkpoints_in(self.setup.directory)
            return
        if self._service is not None:
            yield self._service
            return
        service = make_service(self.setup.config, self.setup.directory, self.setup.trainer_engine)
        try:
            yield service
        except StalledError as error:
            if error.party not in ENGINE_PARTIES:
                service.close()
            raise
        except BaseException:
            service.close()
            raise
        service.close()

    def _open_loggers(self) -> list[Observer]:
        config = self.setup.config
        named = open_loggers(
            config.run.loggers,
            self.setup.directory,
            project=config.run.project,
            run_name=config.run.name,
            settings=config_to_tree(config),
        )
        return [*named, *(LoggerObserver(logger) for logger in self.setup.objects.loggers)]

    def _write_config(self) -> None:
        """Make `run.db`, or take it back to where the run goes on."""
        setup, config, directory = self.setup, self.setup.config, self.setup.directory
        if setup.start.is_new:
            writer = RunWriter.create(directory, config_to_yaml(config), max_size_mb=config.run.max_size_mb)
            writer.set_meta(META_KEY, setup.objects.to_json())
        else:
            writer = RunWriter.reopen(directory, max_size_mb=config.run.max_size_mb)
            done = setup.start.done
            writer.set_meta("config", config_to_yaml(config))
            writer.forget_after(done.step, warmup_steps=done.warmup_steps, critic_batches=setup.start.critic_batches)
            writer.event(done.step, "resumed", path=done.path)
            writer.commit(done.step)
            remove_orphans(directory, setup.start.checkpoints)
            if config.opponent.keep_files == "needed":
                remove_snapshots(directory, setup.start.checkpoints)
        writer.set_meta("plan", "\n".join(setup.plan_lines()))
        writer.close()  # the thread that trains opens it again: SQLite ties a connection to its thread

    @contextlib.contextmanager
    def _open_opponents(self, service: AnyService, recorder: Recorder) -> Generator[Opponents | None]:
        """Load the opponent; None where the world has no opponent, or a script of its own."""
        config, parts, start = self.setup.config, self.setup.parts, self.setup.start
        if not needs_opponents(config, parts.world):
            yield None
            return
        recorder.phase("loading the opponents")
        with Opponents(config, parts.world, service, parts.rollout) as opponents:
            opponents.open()
            if start.state is not None and start.state.opponents is not None:
                lost = opponents.restore(start.state.opponents)
                for why in lost:
                    recorder.opponent_lost(start.done.step, why)
                if start.done.step:  # before the first step, the policy joins
                    opponents.check_pool(lost, NO_MEMBER)
            yield opponents

    async def _run_loop(self, service: AnyService, recorder: Recorder, opponents: Opponents | None) -> None:
        setup, config = self.setup, self.setup.config
        parts = setup.parts if opponents is None else replace(setup.parts, world=opponents.world)
        with self.interrupt.attached(recorder.observers.message):
            recorder.phase("loading the model")
            trainer = await self._make_trainer(service)
            renderer = make_renderer(trainer.get_tokenizer(), config.rollout, config.memory)
            critic = await self._make_critic(service, renderer) if setup.parts.needs_critic else None
            checkpoints = RunCheckpoints(
                trainer,
                recorder.writer,
                setup.start,
                max_kept=config.train.keep_checkpoints,
                critic=critic,
                delete=service.delete_checkpoint,
            )
            publisher = make_publisher(self._backend_setup())
            loop = Loop(
                LoopSetup(
                    parts=parts,
                    trainer=trainer,
                    publisher=publisher,
                    renderer=renderer,
                    recorder=recorder,
                    checkpoints=checkpoints,
                    interrupt=self.interrupt,
                    steering=self.steering,
                    critic=critic,
                    opponents=opponents,
                    learners=find_learners(trainer, config.cluster.learners),
                    k2_tolerance=max(tolerances.k2(dtype) for dtype in (_dtype_name(config), publisher.dtype) if dtype),
                )
            )
            with settled_process():
                async with loop.setup.publisher, Heartbeat(loop, self._on_stuck):
                    await loop.run(setup.start)

    def _backend_setup(self) -> BackendSetup:
        config = self.setup.config
        return BackendSetup(
            rollout=self.setup.parts.rollout,
            model_directory=find_model(config),
            run_directory=self.setup.directory,
            engine=config.engine_in_use,
            cluster=config.cluster,
            lora_rank=config.model.rank,
            weight_transfer=choose_weight_transfer(config, self.setup.facts),
        )

    async def _make_trainer(self, service: AnyService) -> TrainingClient:
        """A new adapter (or all weights), or the one that was saved."""
        config, model, done = self.setup.config, self.setup.config.model, self.setup.start.done
        if done.path:
            return await service.create_training_client_from_state_with_optimizer_async(done.path)
        if model.start_from:
            return await service.create_training_client_from_state_async(model.start_from)
        if model.train == "full":
            return await service.create_full_training_client_async(model.name)
        return await service.create_lora_training_client_async(
            model.name,
            rank=model.rank,
            seed=derive_seed(config.train.seed, "adapter"),
            train_mlp=model.train_mlp,
            train_attn=model.train_attn,
            train_unembed=model.train_unembed,
            **expert_options(model),
        )

    async def _make_critic(self, service: AnyService, renderer: Renderer) -> Critic:
        """A new critic, or the one that was saved with the policy."""
        config, model, done = self.setup.config, self.setup.config.model, self.setup.start.done
        saved = saved_critic(self.setup.directory, done) if done.path else None
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
            client,
            config.critic,
            config.method.make_gae(),
            make_optim(config, critic_rate(config)),
            renderer,
            max_tokens=self.setup.parts.rollout.max_trajectory_tokens,
        )
        if saved is not None:
            critic.num_pretrained = saved.num_pretrained
        if saved is not None and saved.plateau is not None:
            critic.plateau.restore(saved.plateau)
        return critic


def _dtype_name(config: Config) -> str:
    if config.model.base_url:  # it does not say; most train in bfloat16
        return "bfloat16" if config.engine.dtype == "auto" else config.engine.dtype
    from turnwise.engine.engine import choose_device  # torch, which is loaded by now

    _, dtype = choose_device(config.engine)
    return str(dtype).removeprefix("torch.")
