"""The one training loop.

    evaluate, warm up, then step by step:
        tasks -> play groups of attempts -> keep what can be learned from -> gradient -> optimizer -> publish -> log

It talks to a `TrainingClient` and knows neither engine nor model. Tasks and seeds depend on the step alone, so a run
that goes on from a checkpoint does what it would have done without the break. Ctrl-C ends the playing of attempts, but
never a step that has begun to train.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.errors import TurnwiseError
from turnwise.methods.base import Kept, datums_of
from turnwise.renderers.base import Renderer
from turnwise.rollout.certify import K2_TOLERANCE, certify
from turnwise.rollout.group import RolloutResult, play_groups
from turnwise.rollout.quarantine import Quarantine
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.schema import CheckpointRow
from turnwise.train.assemble import Parts, make_optim, split_evenly
from turnwise.train.checkpoint import Checkpoints
from turnwise.train.evaluate import evaluate
from turnwise.train.interrupt import Interrupt, Interrupted
from turnwise.train.metrics import Learned, Times, step_metrics
from turnwise.train.record import Recorder
from turnwise.train.warmup import make_warmup, warm_up_step
from turnwise.trajectory import TrajectoryGroup


class NothingToLearnError(TurnwiseError):
    """Step after step left nothing to learn from."""


class Loop:
    """One run, from the first evaluation to the last."""

    def __init__(
        self,
        parts: Parts,
        trainer: TrainingClient,
        renderer: Renderer,
        recorder: Recorder,
        checkpoints: Checkpoints,
        interrupt: Interrupt,
        *,
        k2_tolerance: float = K2_TOLERANCE,
    ) -> None:
        self._parts = parts
        self._config = parts.config
        self._trainer = trainer
        self._renderer = renderer
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._interrupt = interrupt
        self._k2_tolerance = k2_tolerance
        self._quarantine = Quarantine(
            task_after=parts.rollout.quarantine_task_after, world_after=parts.rollout.quarantine_world_after
        )
        self._num_empty_steps = 0
        self._why_empty: Counter[str] = Counter()

    async def run(self, done: CheckpointRow, evaluated: set[tuple[str, int]]) -> None:
        """Go on from `done`; `evaluated` holds the (label, step) of evaluations that are on record already."""
        self._done_step, self._done_warmup, self._evaluated = done.step, done.warmup_steps, set(evaluated)
        try:
            await self._run()
        except Interrupted:
            await self._checkpoints.save(self._done_step, self._done_warmup)
            raise

    async def _run(self) -> None:
        train, evaluation = self._config.train, self._config.eval
        self._sampler = await self._publish()
        await self._evaluate_once("start", 0)
        await self._warm_up()
        self._recorder.view.phase("training")
        for step in range(self._done_step, train.steps):
            if evaluation.every and step and step % evaluation.every == 0:
                await self._evaluate_once("step", step)
            await self._step(step)
            self._done_step = step + 1
            if train.save_every and self._done_step % train.save_every == 0 and self._done_step < train.steps:
                await self._checkpoints.save(self._done_step, self._done_warmup)
        await self._checkpoints.save(self._done_step, self._done_warmup)
        if train.steps:
            await self._evaluate_once("end", train.steps)

    async def _step(self, step: int) -> None:
        """One batch of tasks, from playing to publishing."""
        parts, started_s = self._parts, time.perf_counter()
        seed = derive_seed(self._config.train.seed, "train", step)
        tasks = parts.tasks.batch(step)
        self._recorder.tasks(tasks, "train")
        played = await self._interrupt.unless(
            play_groups(
                *(parts.world, tasks, self._sampler, self._renderer, parts.rollout),
                seed=seed,
                quarantine=self._quarantine,
            )
        )
        if self._quarantine.world is not None:
            raise TurnwiseError(f"the world {parts.world.name} keeps failing: {self._quarantine.world}")
        played_s = time.perf_counter()
        kept = parts.method.keep(played.groups)
        learned = [await self._learn(groups) for groups in split_evenly(kept.groups, self._config.train.substeps)]
        learned = [one for one in learned if one is not None]
        trained_s = time.perf_counter()
        if learned:
            self._sampler = await self._publish()
        times = Times(
            rollout_s=played_s - started_s, train_s=trained_s - played_s, publish_s=time.perf_counter() - trained_s
        )
        await self._certify(step + 1, played, learned)
        self._recorder.step(step + 1, played, kept, learned, step_metrics(played, kept, learned, times))
        self._check_progress(kept, is_empty=not learned)

    async def _learn(self, groups: Sequence[TrajectoryGroup]) -> Learned | None:
        """One optimizer step on these groups; None when they hold no token to train."""
        method = self._parts.method
        lessons = method.lessons(groups)
        datums = datums_of(lessons)
        if not datums:
            return None
        output = await self._trainer.forward_backward(datums, method.loss_fn, method.loss_config)
        stepped = await self._trainer.optim_step(self._parts.optim)
        return Learned(lessons=lessons, output=output, optim_metrics=stepped.metrics)

    async def _publish(self) -> SamplingClient:
        return await self._trainer.save_weights_and_get_sampling_client_async()

    async def _evaluate_once(self, label: str, step: int) -> None:
        parts = self._parts
        if not parts.held_out or (label, step) in self._evaluated:
            return
        self._recorder.view.phase("evaluating")
        self._recorder.tasks(parts.held_out, "test")
        evaluation = await self._interrupt.unless(
            evaluate(
                *(parts.world, parts.held_out, self._sampler, self._renderer, parts.eval_rollout),
                seed=self._config.train.seed,
                label=label,
                step=step,
            )
        )
        self._recorder.evaluation(evaluation)
        self._evaluated.add((label, step))

    async def _warm_up(self) -> None:
        """Supervised steps; training then starts with their weights and a fresh optimizer."""
        config, seed = self._config.warmup, self._config.train.seed
        if self._done_warmup < config.steps:
            self._recorder.view.phase("warming up")
            batches = make_warmup(self._parts.world, self._renderer, config, seed)
            optim = make_optim(self._config, config.learning_rate)
            for step in range(self._done_warmup, config.steps):
                self._interrupt.check()
                metrics = await warm_up_step(self._trainer, batches.batch(step), optim)
                self._done_warmup = step + 1
                self._recorder.warmup(self._done_warmup, config.steps, metrics)
            warmed = await self._checkpoints.save(0, self._done_warmup)
            await self._trainer.load_state(warmed.path)
            await self._checkpoints.save(0, self._done_warmup)
            self._sampler = await self._publish()
        if config.steps and self._done_step == 0:
            await self._evaluate_once("warm-up", 0)

    async def _certify(self, step: int, played: RolloutResult, learned: Sequence[Learned]) -> None:
        """Check what was trained first in this step: the weights were still the ones that sampled.

        A first or last step that trained on nothing is checked too, on some of its attempts.
        """
        if learned:
            lessons, output = learned[0].lessons, learned[0].output
        elif played.groups and step in (1, self._config.train.steps):
            lessons = self._parts.method.lessons(played.groups[:1])
            datums = datums_of(lessons)
            output = await self._trainer.forward(datums, "cross_entropy") if datums else None
        else:
            return
        answers = [] if output is None else [one["logprobs"].tolist() for one in output.loss_fn_outputs]
        certificate = certify(
            [lesson.trajectory for lesson in lessons],
            lambda _: answers,
            datums=[lesson.datums for lesson in lessons],
            k2_tolerance=self._k2_tolerance,
        )
        self._recorder.writer.certificate(step, certificate.to_json(), is_exact=certificate.is_exact)

    def _check_progress(self, kept: Kept, *, is_empty: bool) -> None:
        """A step without a gradient is logged and passed over; a row of them is an error."""
        if not is_empty:
            self._num_empty_steps = 0
            self._why_empty.clear()
            return
        self._num_empty_steps += 1
        self._why_empty.update(kept.dropped)
        if self._num_empty_steps >= self._config.train.max_empty_steps:
            reasons = ", ".join(f"{count} {why}" for why, count in self._why_empty.most_common()) or "no groups at all"
            raise NothingToLearnError(
                f"{self._num_empty_steps} steps in a row left nothing to learn from (groups: {reasons}). Groups in "
                "which every attempt gets the same reward teach nothing: warm up first (warmup.steps=50), make the "
                "task easier, or play more attempts (generator.n_samples_per_prompt)"
            )
