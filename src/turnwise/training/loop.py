"""The one training loop.

    evaluate, warm up, then step by step:
        a batch of groups -> keep what can be learned from -> gradient -> optimizer -> publish -> log

Groups are played in the background (`supply.py`); with `train.max_staleness` 0 that means: while the loop waits for
them, and synchronous training is this loop with lag 0. `rollout/sources.py` says where the data of a step comes from;
the method says what is made of it. The loop talks to a `TrainingClient` and knows neither engine nor model. Ctrl-C ends
the playing of attempts, but never a step that has begun to train; a checkpoint holds everything that a run needs to go
on as if it had not stopped.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from turnwise.backends import Publisher
from turnwise.client.base import TrainingClient
from turnwise.client.publish import VersionedSampler
from turnwise.credit.shaping import shape_group
from turnwise.doctor import diagnose
from turnwise.errors import LearnerError
from turnwise.opponents.interface import RunOpponents
from turnwise.renderers.base import Renderer
from turnwise.rollout.group import Rollout
from turnwise.rollout.server_options import OTHER_SAMPLERS
from turnwise.rollout.stats import FirstFailures
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import CheckpointRow
from turnwise.runtime import tolerances
from turnwise.runtime.blocking import in_thread
from turnwise.training.assemble import Parts, critic_rate, make_optim
from turnwise.training.checkpoint import NEW_RUN, RunCheckpoints, RunState, Start
from turnwise.training.critic import Critic
from turnwise.training.demonstrations import Demonstrations
from turnwise.training.evaluate import Evaluation, panel_metrics, play_panel, world_metrics
from turnwise.training.learner import Learner
from turnwise.training.learner_news import LearnerNews, OneLearner, OpenStep
from turnwise.training.metrics import Learned, Times, lag_metrics, part_metrics, step_drift, step_metrics
from turnwise.training.preflight import AllFailedError, check_any_left, check_demonstrations, check_earnings
from turnwise.training.pretrain import batch_lessons, play_demonstrations, pretrain, read_lessons, warm_up_step
from turnwise.training.progress import NothingToLearnError, Progress, TokensSpentError, rate_factor
from turnwise.training.record import Recorder
from turnwise.training.steer import Steering
from turnwise.training.supply import Batch, Supply
from turnwise.trajectory import EndReason
from turnwise.watch.alarms import AlarmError, Alarms
from turnwise.watch.interrupt import Interrupt, Interrupted
from turnwise.watch.observer import ObserverError
from turnwise.watch.watchdog import StalledError, Watchdog

SAVED_AFTER = (Interrupted, ObserverError, StalledError, AlarmError, NothingToLearnError, TokensSpentError)
"""Ends of a run that leave its parts as they were after the last step, so that a checkpoint is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetup:
    """What a loop works with: its data, its clients, who writes down what it does, and who stops or steers it."""

    parts: Parts
    trainer: TrainingClient
    publisher: Publisher
    renderer: Renderer
    recorder: Recorder
    checkpoints: RunCheckpoints
    interrupt: Interrupt = field(default_factory=Interrupt)
    steering: Steering = field(default_factory=Steering)
    critic: Critic | None = None
    opponents: RunOpponents | None = None
    """Who plays the other seat, where that is not a script of the world."""
    learners: LearnerNews = field(default_factory=OneLearner)
    k2_tolerance: float = tolerances.K2["float32"]
    """How far the trainer's logprobs may be from the sampler's."""

    def make_watchdog(self) -> Watchdog:
        train = self.parts.config.train
        return Watchdog(call_deadline_s=train.call_deadline_s, stall_deadline_s=train.stall_deadline_s)


class Loop:
    """One run, from the first evaluation to the last."""

    def __init__(self, setup: LoopSetup) -> None:
        parts, train = setup.parts, setup.parts.config.train
        self.setup = setup
        self._parts = parts
        self._config = parts.config
        self._trainer = setup.trainer
        self._publisher = setup.publisher
        self._renderer = setup.renderer
        self._recorder = setup.recorder
        self._checkpoints = setup.checkpoints
        self._interrupt = setup.interrupt
        self._steering = setup.steering
        self._critic = setup.critic
        self._opponents = setup.opponents
        self.watchdog = setup.make_watchdog()
        self.supply = Supply(parts, setup.renderer, self.watchdog)
        self._learner = Learner(parts, setup.trainer, setup.critic, self.watchdog, setup.k2_tolerance)
        self.alarms = Alarms(parts.config.alarms)
        self.num_steps = train.steps
        self.done_step = 0
        self.version = 0
        """Updates that moved the weights."""
        self._state = RunState()
        self._num_critic_batches = 0 if setup.critic is None else setup.critic.num_pretrained
        self._failures = FirstFailures(lambda error: setup.recorder.first_failure(self.done_step, error))
        self.supply.failures = self._failures
        self._progress = Progress(train.max_empty_steps, self._failures)
        self._has_told_why = False
        self._lessons: Demonstrations | None = None
        """What the warm-up shows; read when the run begins."""
        self._is_read = False
        """Something was sampled with the weights that were published last, besides the steps' own groups."""
        self._open_step: OpenStep | None = None
        """The training or warm-up step under way."""

    async def run(self, start: Start = NEW_RUN) -> None:
        """Train from `start` to the end of the run."""
        done, per_step = start.done, self._config.train.tasks_per_step
        self._state = start.state or RunState(version=done.step, num_dealt=done.step * per_step)
        self.version = self._state.version
        self._progress.restore(self._state)
        if self._state.alarms is not None:
            self.alarms.restore(self._state.alarms)
        self._num_drawn, self._num_drawn_before = start.num_drawn, start.num_drawn_before
        self.done_step, self._done_warmup, self._evaluated = done.step, done.warmup_steps, set(start.evaluated)
        try:
            await self._run()
        except SAVED_AFTER as error:
            await self.supply.close()
            if not isinstance(error, StalledError) or error.party == "attempts":
                await self._save()
            if isinstance(error, NothingToLearnError) and not isinstance(error, AllFailedError):
                self._tell_why()
            raise
        except LearnerError:
            await self._save_before_step()
            raise
        finally:
            self._tell_of_learners()
            self._take_orders(is_last=True)
            await self.supply.close()

    async def _run(self) -> None:
        await self.supply.check()
        await self._look_ahead()
        self._sampler = await self._publish()
        await self._evaluate_once("start", 0)
        await self._warm_up()
        if self._opponents is not None and self.num_steps and not self.done_step:
            work = self._opponents.before_first_step(self._trainer)
            await self.watchdog.call("trainer", "save the policy for the pool of opponents", work)
        await self._pretrain_critic()
        await self._publish_unread()
        self._phase("training")
        num_done = self.done_step * self._config.train.accumulate
        self.supply.open(self._sampler, num_done, self._state, self._num_batches)
        while self.done_step < self.num_steps and not self._progress.is_solved:
            step = self.done_step
            if self._is_spent():
                break
            if _is_due(step, self._config.eval.every):
                await self._evaluate_once("step", step)
                await self._publish_unread()
            await self._step(step)
            self._take_orders()
            if _is_due(self.done_step, self._config.train.save_every) and self.done_step < self.num_steps:
                await self._save()
        await self.supply.close()
        if self.num_steps:
            with RunReader(self._recorder.writer.directory) as run:
                self._progress.check_any_judged(run)
        await self._save()
        self._tell_end()
        if self.num_steps:
            await self._evaluate_once("end", self.done_step)

    @property
    def _num_batches(self) -> int:
        return self.num_steps * self._config.train.accumulate

    def _is_spent(self) -> bool:
        """No more tokens may be sampled; before the first step that is an error.

        What was played ahead counts. In a synchronous run, or before the first step, nothing is: groups that wait there
        are those that a process left behind in the middle of the step that comes next.
        """
        train, num_drawn = self._config.train, self._num_drawn
        if train.max_staleness and self.done_step:
            num_drawn += self.supply.num_untaken_tokens
        is_spent = 0 < train.max_sampled_tokens <= num_drawn
        if is_spent and self.num_steps and not self.done_step:
            raise TokensSpentError(num_drawn, train.max_sampled_tokens, self.num_steps)
        return is_spent

    def _tell_end(self) -> None:
        """Write down what nobody learned from, and why there were fewer steps than asked for."""
        num_untaken, bound = self.supply.num_untaken_tokens, self._config.train.max_sampled_tokens
        if num_untaken:
            self._recorder.left_over(self.done_step, num_untaken)
        if self.done_step and not self._progress.is_solved:
            with RunReader(self._recorder.writer.directory) as run:
                why = self._progress.why_not_moved(run, num_updates=self.version)
            if why is not None:
                self._recorder.not_moved(self.done_step, why)
        if self.done_step >= self.num_steps:
            return
        if self._progress.is_solved:
            self._recorder.solved(self.done_step, self._progress.num_empty_steps)
        else:
            self._recorder.tokens_spent(self.done_step, self.num_steps, self._num_drawn + num_untaken, bound)

    async def _step(self, step: int) -> None:
        """One optimizer step, from waiting for its data (or reading it) to publishing."""
        started_s, version = time.perf_counter(), self.version
        self._set_rates(step)
        self._begin_step()
        batch, learned, played_s = await self._learn(step, version)
        trained_s = time.perf_counter()
        if learned:
            self.version += 1
            self._sampler = await self._publish()
        times = Times(
            rollout_s=played_s,
            train_s=trained_s - started_s - played_s,
            publish_s=time.perf_counter() - trained_s,
            is_ahead=self._config.train.max_staleness > 0,
        )
        certificate = None
        if self.supply.is_played:
            spare = batch.played.groups if step + 1 in (1, self.num_steps) else ()
            certificate = await self._learner.certify(spare, learned, version)
        drift = step_drift(learned, version) if self.supply.is_played else None
        metrics = step_metrics(batch.played, batch.kept, learned, times) | self._publisher.take_metrics()
        metrics |= self.setup.learners.metrics()
        metrics |= part_metrics(self._parts.world, self._parts.tasks, batch)
        if self._config.train.max_staleness and batch.taken is not None and self.supply.stream is not None:
            metrics |= lag_metrics(batch.taken, self.supply.stream, learned)
        if drift is not None:
            metrics |= drift.metrics()
            certificate = None if certificate is None else replace(certificate, drift=drift)
        if self._opponents is not None:
            metrics |= self._opponents.count(batch.as_played)
            work = self._opponents.after_step(self._trainer, step + 1)
            await self.watchdog.call("trainer", "save a snapshot for the pool of opponents", work)
        self.supply.publish(self._sampler)
        self.supply.learned(self._num_batches)
        self.done_step = step + 1
        self._recorder.step(self.done_step, batch, learned, metrics, certificate)
        self._open_step = None
        self._tell_of_learners()
        worst = None if drift is None else drift.worst
        self._recorder.worst_token(self.done_step, worst)
        for alarm in self.alarms.check(metrics, "" if worst is None else str(worst)):
            self._recorder.alarm(self.done_step, alarm)
        if self.done_step == 1 and self._config.train.stop_if_all_fail:
            check_any_left(batch.played, "the first step", self._failures)
        if not learned and not self._has_told_why:
            self._tell_why()
        self._progress.check(batch, is_empty=not learned)
        self.alarms.stop_if_lasting()

    async def _look_ahead(self) -> None:
        """Say what is wrong with the world's demonstrations, before anything is spent.

        They are played in a thread: a world may be slow, and meanwhile the run is watched and may be stopped.
        """
        parts, findings = self._parts, [self.supply.left_out]
        if not self.done_step and self.supply.is_played:
            arguments = (parts.world, self._renderer, parts.rollout, self._config.train.seed)
            findings.append(await self._interrupt.unless(in_thread(lambda: check_demonstrations(*arguments))))
        if self._done_warmup < self._config.warmup.steps:
            self._phase("playing demonstrations")
            self._lessons = await self._interrupt.unless(in_thread(lambda: read_lessons(parts, self._renderer)))
            findings.append(self._lessons.left_out)
        for finding in findings:
            if finding is not None:
                self._recorder.finding(finding)

    async def _look_at_first(self, evaluation: Evaluation) -> None:
        """Say what the evaluation before the first step shows; stop if every attempt of it failed."""
        if self._config.train.stop_if_all_fail:
            check_any_left(evaluation.played, "the first evaluation", self._failures)
        has_more = self._config.warmup.steps and evaluation.row.label == "start"
        if has_more or not self.supply.is_played or check_earnings(evaluation.played) is None:
            return
        played = await play_demonstrations(self._parts, self._renderer)
        shown = [one.total_reward for one in played if one.end_reason is EndReason.TERMINATED and not one.is_cut]
        finding = check_earnings(evaluation.played, shown or None, warmup_steps=self._config.warmup.steps)
        assert finding is not None, "nothing was earned a moment ago either"
        self._recorder.finding(finding)

    def _tell_why(self) -> None:
        """Say in words why nothing is learned, and what to change."""
        self._has_told_why = True
        with RunReader(self._recorder.writer.directory) as run:
            self._recorder.findings(self.done_step, diagnose(run))

    async def _learn(self, step: int, version: int) -> tuple[Batch, list[Learned], float]:
        """Play and learn from the batches of a step, then move the weights; also the seconds of playing.

        A stop in between loses nothing: the batches go back to the pool, and their gradients are made again.
        """
        num_batches = self._config.train.accumulate
        assert self._open_step is not None, "a step has begun"
        batches = self._open_step.batches
        learned: list[Learned] = []
        played_s = 0.0
        for number in range(num_batches):
            started_s = time.perf_counter()
            try:
                batch = await self._interrupt.unless(self.supply.batch(step * num_batches + number))
            except BaseException:
                self.supply.give_back(batches)
                batches.clear()
                raise
            played_s += time.perf_counter() - started_s
            self._recorder.tasks(batch.tasks, "train")
            self._num_drawn += batch.played.stats.num_drawn
            batches.append(batch)
            await self.watchdog.call("sampler", "give its memory back", self._publisher.rest())
            if num_batches == 1:
                learned = await self._learner.learn(batch.items, self._optim, version)
            else:
                learned += await self._learner.accumulate(batch.items, version, num_batches)
                if number + 1 < num_batches:
                    self.supply.learned(self._num_batches)
        if num_batches > 1 and learned:
            learned = [*learned[:-1], await self._learner.update(learned, self._optim)]
        return Batch.merged(batches), learned, played_s

    def _set_rates(self, step: int) -> None:
        """The learning rates of a step: the schedule's share of the full ones."""
        config = self._config
        factor = rate_factor(config.train, step, self._num_drawn, self._num_drawn_before)
        self._optim = make_optim(config, factor * config.train.learning_rate)
        if self._critic is not None:
            self._critic.optim = make_optim(config, factor * critic_rate(config))

    async def _publish(self) -> VersionedSampler:
        self._is_read = False
        work = self._publisher.publish(self._trainer, self.version)
        sampler = await self.watchdog.call("trainer", "publish the weights", work)
        if self._opponents is not None:
            self._opponents.follow(sampler)
        return sampler

    async def _publish_unread(self) -> None:
        """Begin a synchronous step with nothing read: prompts of an evaluation stay cached under their weights, and a
        prompt that begins like them is then rounded otherwise than in a resumed run, which does not evaluate again."""
        is_server = self._config.rollout.backend in OTHER_SAMPLERS  # it rounds by what else is in its batch anyway
        if self._is_read and not self._config.train.max_staleness and not is_server:
            self._sampler = await self._publish()
            self.supply.publish(self._sampler)

    async def _save(self) -> CheckpointRow:
        """Everything that a process needs to go on from here."""
        if self.supply.stream is not None:
            self._state = self.supply.state(
                RunState(
                    version=self.version,
                    num_empty_steps=self._progress.num_empty_steps,
                    why_empty=dict(self._progress.why_empty),
                    alarms=self.alarms.to_state(),
                    opponents=None if self._opponents is None else self._opponents.to_state(),
                )
            )
        work = self._checkpoints.save(self.done_step, self._done_warmup, self._state)
        row = await self.watchdog.call("trainer", "save a checkpoint", work)
        if self._opponents is not None:
            for path in self._opponents.let_go(self._checkpoints.pools):
                await self._checkpoints.remove(path)
        self._recorder.checkpoint(row)
        return row

    def _begin_step(self) -> None:
        self._open_step = OpenStep(self.version)
        self.setup.learners.begin_step()

    async def _save_before_step(self) -> None:
        """Learners were given up in the middle of a step: save the run as it was before, if that can be had back."""
        step = self._open_step
        if step is not None and await self.setup.learners.undo_step():
            self.supply.give_back(step.batches)
            await self.supply.close()
            self.version = step.version
            await self._save()

    def _tell_of_learners(self) -> None:
        for text in self.setup.learners.take_news():
            self._recorder.learners_changed(self.done_step, text)

    def _take_orders(self, *, is_last: bool = False) -> None:
        """Take settings that were changed while the run goes on; a run that is resumed has those that came last too."""
        for name, value in self._steering.take(is_last=is_last).items():
            config = self._steering.apply(self._config, name, value)
            self._config = config
            self.num_steps = config.train.steps
            self._recorder.steered(self.done_step, config, name, value)

    def _phase(self, name: str) -> None:
        self._recorder.phase(name)

    async def _evaluate_once(self, label: str, step: int) -> None:
        parts = self._parts
        if not parts.held_out or (label, step) in self._evaluated:
            return
        self._phase("evaluating")
        self._recorder.tasks(parts.held_out, "test")
        evaluation = await self._play_held_out(label, step)
        self._recorder.evaluation(evaluation)
        self._recorder.worlds(evaluation.by_world)
        if evaluation.by_opponent or evaluation.by_world:
            self._recorder.held_out_metrics(step, panel_metrics(evaluation) | world_metrics(evaluation))
        await self._judge_critic(evaluation)
        self._evaluated.add((label, step))
        self._is_read = True
        if label in ("start", "warm-up"):
            await self._look_at_first(evaluation)
        if self._config.eval.keep_best and self._checkpoints.is_best(evaluation.row):
            if not self._checkpoints.has(step):
                await self._save()
            await self._checkpoints.keep_best(evaluation.row)

    async def _play_held_out(self, label: str, step: int) -> Evaluation:
        parts = self._parts
        worlds = {"": parts.world} if self._opponents is None else self._opponents.panel_worlds()
        rollouts = {
            name: Rollout(world, self._sampler, self._renderer, parts.eval_rollout) for name, world in worlds.items()
        }
        for rollout in rollouts.values():
            rollout.stats.failures = self._failures
            rollout.rules = parts.eval_rules
        seed = self._config.train.seed
        work = play_panel(rollouts, parts.held_out, seed=seed, label=label, step=step)
        return await self._interrupt.unless(work)

    async def _judge_critic(self, evaluation: Evaluation) -> None:
        """The error of the critic's values on held-out attempts."""
        groups = [shape_group(group, self._parts.shaping) for group in evaluation.played.groups]
        trajectories = [one for group in groups for one in group.trajectories]
        if self._critic is None or not trajectories:
            return
        work = self._critic.held_out_errors(trajectories)
        metrics = await self.watchdog.call("critic", "judge held-out attempts", work)
        self._recorder.held_out_metrics(evaluation.row.step, metrics)

    async def _warm_up(self) -> None:
        """Supervised steps; training then starts with their weights and a fresh optimizer."""
        config = self._config.warmup
        if self._lessons is not None:
            self._phase("warming up")
            batches, self._lessons = batch_lessons(self._lessons, self._parts), None
            optim = make_optim(self._config, config.learning_rate)
            await self.watchdog.call("sampler", "give its memory back", self._publisher.rest())
            for step in range(self._done_warmup, config.steps):
                self._interrupt.check()
                self._begin_step()
                work = warm_up_step(self._trainer, batches.batch(step), optim)
                metrics = await self.watchdog.call("trainer", "warm-up step", work)
                self._done_warmup = step + 1
                self._recorder.warmup(self._done_warmup, config.steps, metrics)
                self._open_step = None
            await self.watchdog.call("trainer", "drop the optimizer's state", self._checkpoints.reload())
            await self._save()
            self._sampler = await self._publish()
        if config.steps and self.done_step == 0:
            await self._evaluate_once("warm-up", 0)

    async def _pretrain_critic(self) -> None:
        """The critic learns alone what attempts of the policy are worth; the policy stays as it is."""
        critic = self._critic
        if critic is None or critic.is_pretrained or self.done_step:
            return
        self._phase("training the critic")
        save_every = self._config.train.save_every
        arguments = (self._parts, self._renderer, self._sampler, self._interrupt, self.watchdog)
        async with aclosing(pretrain(critic, *arguments)) as batches:
            async for metrics in batches:
                self._num_critic_batches += 1
                self._num_drawn += round(metrics["sampled_tokens"])
                self._num_drawn_before = self._num_drawn
                self._recorder.critic(self._num_critic_batches, critic.config.pretrain_steps, metrics)
                self._is_spent()
                if save_every and self._num_critic_batches % save_every == 0 and not critic.is_pretrained:
                    await self._save()
        self._is_read = True
        if self._parts.held_out:
            self._phase("evaluating the critic")
            await self._judge_critic(await self._play_held_out("critic", 0))
        await self._save()


def _is_due(step: int, every: int) -> bool:
    """Whether something that is due every `every` steps (0: never) is due after step `step`."""
    return bool(every and step and step % every == 0)
