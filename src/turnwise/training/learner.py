"""The learning half of a step: lessons, optimizer steps, and the proof that they trained what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from turnwise.client.base import TrainingClient
from turnwise.methods.base import (
    Lesson,
    Method,
    datums_of,
    imitated_successes,
    scaled,
    with_old_logprobs,
    with_old_share,
)
from turnwise.methods.kl_penalty import with_kl_penalty
from turnwise.rollout.certify import Certificate, certify
from turnwise.training.assemble import Parts, split_evenly
from turnwise.training.critic import Critic
from turnwise.training.metrics import Learned
from turnwise.trajectory import TrajectoryGroup
from turnwise.types import AdamParams, ForwardBackwardOutput
from turnwise.watch.watchdog import Watchdog


class Learner:
    """Turns what a step was given into weights."""

    def __init__(
        self, parts: Parts, trainer: TrainingClient, critic: Critic | None, watchdog: Watchdog, k2_tolerance: float
    ) -> None:
        self._parts = parts
        self._trainer = trainer
        self._critic = critic
        self._watchdog = watchdog
        self._k2_tolerance = k2_tolerance

    async def learn(self, items: Sequence[Any], optim: AdamParams, version: int) -> list[Learned]:
        """All optimizer steps of one batch; their lessons are made before the first one moves a weight of `version`."""
        shares = split_evenly(items, self._parts.config.train.substeps)
        prepared = [await self._prepare(share, version) for share in shares]
        return [await self.update([await self._add(one)], optim) for one in prepared if datums_of(one)]

    async def accumulate(self, items: Sequence[Any], version: int, num_batches: int) -> list[Learned]:
        """Add the gradient of one batch of several, a share of 1 / `num_batches`; the weights stay as they are."""
        lessons = await self._prepare(items, version)
        if not datums_of(lessons):
            return []
        return [await self._add([scaled(lesson, 1 / num_batches) for lesson in lessons], share=1 / num_batches)]

    async def update(self, learned: Sequence[Learned], optim: AdamParams) -> Learned:
        """Move the weights by the gradients that were added; returns the last of them with the optimizer's numbers."""
        stepped = await self._call("optim_step", self._trainer.optim_step(optim))
        metrics = dict(stepped.metrics)
        if self._critic is not None:
            lessons = [lesson for one in learned for lesson in one.lessons]
            metrics |= await self._watchdog.call("critic", "learn", self._critic.learn(lessons))
        return replace(learned[-1], optim_metrics=metrics)

    async def certify(
        self, groups: Sequence[TrajectoryGroup], learned: Sequence[Learned], version: int
    ) -> Certificate | None:
        """Check what was trained first in a step: the weights were still those of `version`.

        Args:
            groups: what to check where nothing was trained.
        """
        output: ForwardBackwardOutput | None
        if learned:
            lessons, output = learned[0].lessons, learned[0].output
        elif groups:
            lessons = await self._prepare(groups[:1], version)
            datums = datums_of(lessons)
            output = await self._call("forward", self._trainer.forward(datums, "cross_entropy")) if datums else None
        else:
            return None
        answers = [] if output is None else [one["logprobs"].tolist() for one in output.loss_fn_outputs]
        certificate = certify(
            [lesson.trajectory for lesson in lessons if lesson.trajectory is not None],
            lambda _: answers,
            datums=[lesson.datums for lesson in lessons],
            only_version=version,
            k2_tolerance=self._k2_tolerance,
        )
        return replace(certificate, is_trained=bool(learned))

    async def _prepare(self, items: Sequence[Any], version: int) -> list[Lesson]:
        method, config = self._parts.method, self._parts.config.method_in_use
        if self._critic is None:
            lessons = method.lessons(items)
        else:
            asked = self._critic.values([t for group in items for t in group.trajectories])
            values = await self._watchdog.call("critic", "values", asked)
            lessons = cast(Method, method).lessons(items, values)
        datums = datums_of(lessons)
        if (kl := config.advantage_kl) is not None and datums:
            work = self._trainer.forward(datums, "cross_entropy", {"kl_reference": "base"})
            known = [one["logprobs"] for one in (await self._call("forward", work)).loss_fn_outputs]
            lessons = with_kl_penalty(lessons, known, coef=kl.coef, gamma=kl.gamma)
            datums = datums_of(lessons)
        if config.old_policy_source == "none" or not datums:
            return lessons
        if config.old_policy_source == "loglinear":
            return with_old_share(lessons, version)
        output = await self._call("forward", self._trainer.forward(datums, "cross_entropy"))
        return with_old_logprobs(lessons, [one["logprobs"] for one in output.loss_fn_outputs])

    async def _add(self, lessons: Sequence[Lesson], share: float = 1.0) -> Learned:
        """Add the gradient of these lessons, a share of an optimizer step, to what is there."""
        method, datums = self._parts.method, datums_of(lessons)
        output = await self._call(
            "forward_backward", self._trainer.forward_backward(datums, method.loss_fn, method.loss_config)
        )
        coef = self._parts.config.method_in_use.imitation_coef
        successes = imitated_successes(lessons, coef * share) if coef else []
        if successes:
            imitated = await self._call("forward_backward", self._trainer.forward_backward(successes, "cross_entropy"))
            loss = imitated.metrics["loss:sum"] / (coef * share)
            output = replace(output, metrics={**output.metrics, "positive_nll:mean": loss})
        return Learned(lessons=lessons, output=output)

    async def _call(self, what: str, work: Any) -> Any:
        return await self._watchdog.call("trainer", what, work)
