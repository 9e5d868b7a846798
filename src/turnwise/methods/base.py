"""What the loop asks a method: where its data comes from, which groups to keep, the credit of each turn, and the loss.
The options of methods are in `options.py`.

    kept = method.keep(groups)
    lessons = method.lessons(kept.groups)
    await trainer.forward_backward(datums_of(lessons), method.loss_fn, method.loss_config)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from turnwise.credit.datums import TurnAdvantage, trained_mask, trajectory_to_datums
from turnwise.credit.values import TrajectoryValues, Values
from turnwise.credit.weights import Weighting, share_of, weigh
from turnwise.errors import ConfigError
from turnwise.rollout.sources import PLAY_GROUPS, PlayBranches, PlayGroups, ReadDialogues, ReadPairs, Source
from turnwise.runtime.section import Section
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import Datum, TensorData

__all__ = [
    "PLAY_GROUPS",
    "AnyMethod",
    "Credited",
    "DataConfig",
    "Kept",
    "Lesson",
    "Method",
    "MethodSetup",
    "PlayBranches",
    "PlayGroups",
    "ReadDialogues",
    "ReadPairs",
    "ReadingMethod",
    "Source",
    "Values",
    "credit_groups",
    "datums_of",
    "imitated_successes",
    "keep_by",
    "make_lessons",
    "scaled",
    "why_no_signal",
    "why_unusable",
    "with_old_logprobs",
    "with_old_share",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One trajectory with its credit, as datums that a trainer can learn from."""

    trajectory: Trajectory | None
    """None if the data was written and not played. A turn that the datums leave out has `is_trained` false here."""
    advantages: tuple[TurnAdvantage, ...]
    """One entry per turn: a number, or [S] one for each sampled token."""
    datums: tuple[Datum, ...]
    """Their weights are those of one optimizer step. An attempt whose history was rewritten has several datums."""
    returns: tuple[NDArray[np.float64], ...] | None = None
    """[S] per turn: what the critic should predict. None without a critic."""
    values: TrajectoryValues | None = None
    """What the critic predicted at the start of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The groups of a batch that a method learns from, and why it dropped the others."""

    groups: tuple[TrajectoryGroup, ...]
    reasons: tuple[str | None, ...]
    """One entry per group of the batch: None if it was kept, else the reason why it was dropped."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of dropped groups by reason."""
        return Counter(reason for reason in self.reasons if reason is not None)


class Method(Protocol):
    """A method that learns from attempts. The loop samples, `credit` does the arithmetic, a method connects both.

    A built method has these parts; pass it as `turnwise.train(..., method=it)`:

    - `source`: what the loop plays for a step: `PLAY_GROUPS` (several attempts at each task) or `PlayBranches(...)`.
    - `loss_fn`: the name of the loss that reads the lessons, such as `"importance_sampling"` or `"ppo"`.
    - `loss_config`: settings of that loss by name; `{}` for its defaults.
    - `needs_values`, `keep` and `lessons`: see below.

    A method that has options, or that the command line can name, is a class with an inner class
    `Options(FreeLoss)` (`turnwise.methods.options`). The fields of `Options` are what `method={...}` may say. Its
    `build(setup)` returns the method, with `loss_fn=self.loss` and `loss_config=self.loss_config`; `setup` is a
    `MethodSetup`. docs/algorithms/README.md has a whole example.

    >>> from turnwise.methods.grpo import Grpo
    >>> method = Grpo(loss_fn="importance_sampling", loss_config={})
    >>> method.keep([]).groups
    ()
    """

    @property
    def source(self) -> PlayGroups | PlayBranches:
        """What the loop plays for a step."""
        ...

    @property
    def loss_fn(self) -> str:
        """Name of the loss."""
        ...

    @property
    def loss_config(self) -> Mapping[str, float | str]:
        """Settings of the loss by name."""
        ...

    @property
    def needs_values(self) -> bool:
        """Whether the loop asks the critic for values and passes them to `lessons`."""
        ...

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        """Choose the groups that teach something, and give a reason for each of the others."""
        ...

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:
        """Make the lessons of one optimizer step; normalisers count over all of its groups."""
        ...


Item_contra = TypeVar("Item_contra", contravariant=True)


class ReadingMethod(Protocol[Item_contra]):
    """A method that learns from stored data: `training.supply` reads items, the method makes lessons from them."""

    @property
    def source(self) -> ReadDialogues | ReadPairs: ...

    @property
    def loss_fn(self) -> str: ...

    @property
    def loss_config(self) -> Mapping[str, float | str]: ...

    def lessons(self, items: Sequence[Item_contra]) -> list[Lesson]: ...


AnyMethod = Method | ReadingMethod[Any]


class DataConfig(Section):
    """Stored data to learn from, for the methods that read some."""

    dialogues: str = Field(
        default="",
        description="For sft: a run directory, whose successes in training are imitated, or a .jsonl file that "
        "`turnwise pools` wrote. Empty: the world's dialogues.",
    )
    world: str = Field(
        default="",
        description="With data.dialogues and a run in several worlds (env.mix): the member whose attempts are read. "
        "Empty: all.",
    )
    pairs: str = Field(default="", description="A file of preference pairs to learn from, made by `turnwise pairs`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSetup:
    """What a method is built from besides its own options."""

    data: DataConfig
    group_size: int
    """Attempts per task."""
    max_turns: int
    max_tokens: int
    """Most tokens that an attempt may sample."""
    potential_weight: float = 0.0
    """Weight of the env's potentials, which the rewards contain with the method's discount; 0 if they contain none."""


Credited = tuple[Trajectory, Sequence[TurnAdvantage]]
"""A trajectory and the advantage of each of its turns."""


GroupAdvantages = Callable[[TrajectoryGroup], Sequence[NDArray[np.float64]]]
"""A function from a group to [K] per attempt: one number per turn."""


def make_lessons(
    credited: Sequence[Sequence[Credited]], weighting: Weighting, *, is_split: bool = False
) -> list[Lesson]:
    """Make the lessons of one optimizer step from trajectories by group."""
    flat = [(index, *one) for index, group in enumerate(credited) for one in group]
    batch = [trajectory_to_datums(trajectory, advantages, is_split=is_split) for _, trajectory, advantages in flat]
    weighted = weigh(batch, weighting, [share_of(trajectory, index) for index, trajectory, _ in flat])
    return [
        Lesson(trajectory=trajectory, advantages=tuple(advantages), datums=tuple(datums))
        for (_, trajectory, advantages), datums in zip(flat, weighted, strict=True)
    ]


def keep_by(why: Callable[[TrajectoryGroup], str | None], groups: Sequence[TrajectoryGroup]) -> Kept:
    """Keep the groups for which `why` returns no reason."""
    reasons = tuple(why(group) for group in groups)
    kept = tuple(group for group, reason in zip(groups, reasons, strict=True) if reason is None)
    return Kept(groups=kept, reasons=reasons)


def checked_kept(kept: object, method: object, num_groups: int) -> Kept:
    """What a method's `keep` returned; a method from outside may return something else."""
    if not isinstance(kept, Kept):
        raise ConfigError(
            f"{type(method).__name__}.keep(groups) returned {type(kept).__name__}; expected Kept(groups=(...), "
            "reasons=(...)) with one reason per group, None for those that are kept (turnwise.methods.base.keep_by)"
        )
    if len(kept.reasons) != num_groups:
        raise ConfigError(
            f"{type(method).__name__}.keep(groups) gave {len(kept.reasons)} reasons for {num_groups} groups; expected "
            "one per group, None for those that are kept (turnwise.methods.base.keep_by)"
        )
    return kept


def why_unusable(group: TrajectoryGroup, *, min_size: int = 2) -> str | None:
    """Reasons that hold for every method: too few attempts to compare, or no trained turn in any of them."""
    if len(group.trajectories) < min_size:
        return "too_small"
    if not any(turn.is_trained for trajectory in group.trajectories for turn in trajectory.turns):
        return "masked"
    return None


def scaled(lesson: Lesson, share: float) -> Lesson:
    """The same lesson as a share of an optimizer step. A loss is a weighted sum, so the weights are scaled."""
    datums = [
        Datum(datum.model_input, {**inputs, "weights": TensorData([share * w for w in inputs["weights"].tolist()])})
        for datum in lesson.datums
        for inputs in [datum.loss_fn_inputs]
    ]
    return replace(lesson, datums=tuple(datums))


def imitated_successes(lessons: Sequence[Lesson], coef: float) -> list[Datum]:
    """The successes among the lessons as datums of `cross_entropy`, whose loss is `coef` times the mean negative
    log-likelihood of their trained tokens (VAPO's positive-example loss, arXiv:2504.05118)."""
    chosen = [one for one in lessons if one.trajectory is not None and one.trajectory.is_success]
    masks = [(datum, trained_mask(datum)) for datum in datums_of(chosen)]
    total = sum(sum(mask) for _, mask in masks)
    kept = ("target_tokens", "mask", "temperature")
    return [
        Datum(
            datum.model_input,
            {
                **{name: column for name, column in datum.loss_fn_inputs.items() if name in kept},
                "weights": TensorData([coef * flag / total for flag in mask]),
            },
        )
        for datum, mask in masks
    ]


def with_old_logprobs(lessons: Sequence[Lesson], logprobs: Sequence[TensorData]) -> list[Lesson]:
    """The same lessons with the logprobs of the weights at the start of the batch, one tensor per datum."""
    rest = iter(logprobs)
    return [
        replace(
            lesson,
            datums=tuple(
                Datum(datum.model_input, {**datum.loss_fn_inputs, "old_logprobs": next(rest)})
                for datum in lesson.datums
            ),
        )
        for lesson in lessons
    ]


def with_old_share(lessons: Sequence[Lesson], version: int) -> list[Lesson]:
    """The same lessons with the old policy estimated from versions, which saves the forward pass.

    The old logprob is assumed to lie between the sampler's and the trainer's. The old weights have `version` and the
    step makes the next one, so for a token that lags n updates it lies n / (n + 1) of the way (arXiv:2512.06547).
    """
    return [replace(lesson, datums=_with_share(lesson, version)) for lesson in lessons]


def _with_share(lesson: Lesson, version: int) -> tuple[Datum, ...]:
    """A lesson's datums hold its trained tokens in the order of turns, so a running count finds each one's version."""
    assert lesson.trajectory is not None, "what was not played has no version"
    trained = [turn for turn in lesson.trajectory.turns if turn.is_trained]
    lags = iter([max(0, version - one) for turn in trained for one in turn.versions])
    found: list[Datum] = []
    for datum in lesson.datums:
        own = [next(lags) if is_trained else 0 for is_trained in trained_mask(datum)]
        share = TensorData([lag / (lag + 1) for lag in own])
        found.append(Datum(datum.model_input, {**datum.loss_fn_inputs, "old_share": share}))
    assert next(lags, None) is None, "datums train fewer tokens than their turns sampled"
    return tuple(found)


def credit_groups(groups: Sequence[TrajectoryGroup], advantages: GroupAdvantages) -> list[list[Credited]]:
    """Every trajectory with the advantages of its turns, by group."""
    return [
        [(trajectory, own_K.tolist()) for trajectory, own_K in zip(group.trajectories, advantages(group), strict=True)]
        for group in groups
    ]


def why_no_signal(group: TrajectoryGroup, advantages: GroupAdvantages) -> str | None:
    """Why a group teaches nothing: it is unusable, or all its turns have an advantage of 0."""
    unusable = why_unusable(group)
    if unusable is not None:
        return unusable
    return None if any(own_K.any() for own_K in advantages(group)) else "constant"


def datums_of(lessons: Sequence[Lesson]) -> list[Datum]:
    return [datum for lesson in lessons for datum in lesson.datums]
