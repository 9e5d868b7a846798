"""The critic in a run: it values attempts before the policy learns from them, and then learns their returns.

It is a `TrainingClient` of its own, with the loss `value`. Before the policy's first step it may be trained alone, on
attempts of the policy as it is (`pretrain.py`); a critic that knows nothing gives advantages that are noise, and a
policy that follows them forgets what it could.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict

import numpy as np

from turnwise.client.base import TrainingClient
from turnwise.config.critic import CriticConfig
from turnwise.credit.gae import Gae
from turnwise.credit.values import (
    FloatArray,
    TrajectoryValues,
    Values,
    concatenated,
    error_by_position,
    explained_variance,
    read_values,
    value_datums,
    value_sequences,
)
from turnwise.methods.base import Lesson
from turnwise.renderers.base import Renderer
from turnwise.training.metrics import strip_reductions
from turnwise.trajectory import Trajectory
from turnwise.types import AdamParams, Datum

NUM_PARTS = 5
"""The error on held-out attempts is reported for this many parts of an attempt, from its first to its last turns."""
Taught = tuple[Trajectory, TrajectoryValues, Sequence[FloatArray]]
"""An attempt, what the critic said of it, and what it should have said: [S] per turn."""


class Critic:
    """Estimates the values of attempts, and learns from them."""

    def __init__(
        self,
        client: TrainingClient,
        config: CriticConfig,
        gae: Gae,
        optim: AdamParams,
        renderer: Renderer,
        *,
        max_tokens: int,
    ) -> None:
        """Wrap a critic's client. `max_tokens` is the longest prompt that it may be given."""
        self.client = client
        self.config = config
        self.num_pretrained = 0
        """Number of batches that it has learned from before the policy's first step."""
        self.plateau = Plateau(config.pretrain_patience)
        """Whether pre-training still improves, over all its batches."""
        self._gae = gae
        self.optim = optim
        self._renderer = renderer
        self._max_tokens = max_tokens

    @property
    def is_pretrained(self) -> bool:
        return self.num_pretrained >= self.config.pretrain_steps

    async def values(self, trajectories: Sequence[Trajectory]) -> Values:
        """Compute the critic's values along each attempt, without a gradient."""
        asked = [value_sequences(one, self._next_prompt(one)) for one in trajectories]
        questions = [sequence.question() for sequences in asked for sequence in sequences]
        if not questions:
            return []
        output = await self.client.forward(questions, "value")
        answers = iter(one["values"].tolist() for one in output.loss_fn_outputs)
        return [
            read_values(one, sequences, [next(answers) for _ in sequences])
            for one, sequences in zip(trajectories, asked, strict=True)
        ]

    async def held_out_errors(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The error of its values on attempts that are not trained on, by fifth of the attempt.

        What came is the plain return, whatever lambda its targets have. Only the states count that it learns: of
        every token, or of each turn's first.
        """
        judged = [one for one in trajectories if one.failure is None]
        values = await self.values(judged)
        gae = self._gae
        plain = replace(gae, critic_lambda=1.0, level="turn" if gae.first_only else "token")
        returns = [gae.learned(plain.returns(one, known)) for one, known in zip(judged, values, strict=True)]
        found = error_by_position(returns, [gae.learned(known.turns) for known in values], num_parts=NUM_PARTS)
        metrics: dict[str, float] = {}
        for part, (error, explained) in enumerate(found, start=1):
            metrics |= {f"eval/critic_error_{part}": error, f"eval/critic_explained_variance_{part}": explained}
        return metrics

    async def learn(self, lessons: Sequence[Lesson]) -> Mapping[str, float]:
        """Learn the returns that the lessons carry; metrics without a room."""
        taught: list[Taught] = []
        for lesson in lessons:
            assert lesson.trajectory is not None, "a method with a critic plays its attempts"
            assert lesson.returns is not None, "a method with a critic says what came of each turn"
            assert lesson.values is not None, "a method with a critic keeps what it was told"
            taught.append((lesson.trajectory, lesson.values, lesson.returns))
        clip = {"value_clip": self.config.value_clip} if self.config.value_clip else None
        metrics = await self._teach(taught, self.optim, self.config.updates, clip)
        return {f"critic_{key}": value for key, value in metrics.items()}

    async def study(self, trajectories: Sequence[Trajectory], optim: AdamParams) -> dict[str, float]:
        """Learn from attempts that teach the policy nothing: one batch of the pre-training.

        The explained variance is that of the values before this batch was learned. Values may move as far as they can:
        a clip would keep a new critic, which says 0 everywhere, from the mean of the returns for several batches.
        """
        values = await self.values(trajectories)
        returns = [self._gae.returns(one, known) for one, known in zip(trajectories, values, strict=True)]
        taught = list(zip(trajectories, values, returns, strict=True))
        return await self._teach(taught, optim, self.config.pretrain_updates)

    async def _teach(
        self, taught: Sequence[Taught], optim: AdamParams, updates: int, clip: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        datums = self._datums(taught)
        metrics: dict[str, float] = {}
        for update in range(updates):
            output = await self.client.forward_backward(datums, "value", clip)
            stepped = await self.client.optim_step(optim)
            if update == 0:  # of several, what it was like before
                metrics = strip_reductions({**output.metrics, **stepped.metrics})
        first_only = self._gae.first_only
        said = np.fromiter(
            (v for _, known, _ in taught for v in concatenated(known.turns, first_only=first_only)), float
        )
        came = np.fromiter((r for _, _, due in taught for r in concatenated(due, first_only=first_only)), float)
        kept = ("loss", "value", "return", "value_error", "value_clip_fraction", "grad_norm")
        found = {name: metrics[name] for name in kept if name in metrics}
        return found | {"explained_variance": explained_variance(came, said)}

    def _datums(self, taught: Sequence[Taught]) -> list[Datum]:
        """Every learned position weighs the same."""
        first_only = self._gae.first_only
        total = sum(1 for _, _, due in taught for _ in concatenated(due, first_only=first_only))
        return [
            datum
            for one, known, due in taught
            for datum in value_datums(
                value_sequences(one), due, known, weight=1.0 / max(total, 1), first_only=first_only
            )
        ]

    def _next_prompt(self, trajectory: Trajectory) -> Sequence[int]:
        """What the turn after the last would have been shown; empty where the task came to its end, or where it would
        not fit into the model.
        """
        last = trajectory.turns[-1]
        if not trajectory.is_truncated or not last.observation:
            return ()
        history = trajectory.messages[: -1 - len(last.observation)]  # without the last turn, which may be the only one
        ids = self._renderer.extend(last.prompt_ids, last.sampled_ids, last.observation, history=history).ids
        return ids if len(ids) <= self._max_tokens else ()


MIN_RISE = 0.01
"""The smallest rise of the explained variance that counts as better."""
MIN_FALL = 0.02
"""A fall of the loss by this share of it counts as better. A critic that still learns the mean explains no variance
yet, but its loss falls."""


class PlateauState(TypedDict):
    """What a `Plateau` knows, ready for JSON; None where nothing was measured yet."""

    best_variance: float | None
    best_loss: float | None
    num_since: int


class Plateau:
    """Knows when a critic's pre-training has nothing more to gain: neither the explained variance rises nor the loss
    falls any more."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._best_variance, self._best_loss = -math.inf, math.inf
        self._num_since = 0

    def is_reached(self, explained_variance: float, loss: float) -> bool:
        """Whether the last `patience` batches brought no progress, this one included.

        A variance that could not be measured (nan) counts as no progress.
        """
        is_rising = explained_variance >= self._best_variance + MIN_RISE
        is_falling = loss < self._best_loss * (1 - MIN_FALL)
        if is_rising:
            self._best_variance = explained_variance
        if is_falling:
            self._best_loss = loss
        self._num_since = 0 if is_rising or is_falling else self._num_since + 1
        return self._num_since >= self._patience

    def to_state(self) -> PlateauState:
        best = (value if math.isfinite(value) else None for value in (self._best_variance, self._best_loss))
        return PlateauState(best_variance=next(best), best_loss=next(best), num_since=self._num_since)

    def restore(self, state: PlateauState) -> None:
        variance, loss = state["best_variance"], state["best_loss"]
        self._best_variance = -math.inf if variance is None else variance
        self._best_loss = math.inf if loss is None else loss
        self._num_since = state["num_since"]
