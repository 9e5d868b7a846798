"""What the loop asks of a method: which groups to keep, what each turn deserves, and the loss that reads it.

kept, dropped = method.keep(groups)
lessons = method.lessons(kept)
await trainer.forward_backward(datums_of(lessons), method.loss_fn, method.loss_config)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One trajectory, ready to be learned from."""

    trajectory: Trajectory
    advantages: tuple[float, ...]
    """One per turn."""
    datums: tuple[Datum, ...]
    """Weighted for the optimizer step that they belong to; several where the history was rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a method leaves of a batch of groups."""

    groups: tuple[TrajectoryGroup, ...]
    reasons: tuple[str | None, ...]
    """One per group that came: None where it was kept, else why it went."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """How many groups went, by reason."""
        return Counter(reason for reason in self.reasons if reason is not None)


class Method(Protocol):
    """Sampling is the loop's, arithmetic is `credit`'s; a method says how the two meet."""

    @property
    def loss_fn(self) -> str: ...

    @property
    def loss_config(self) -> Mapping[str, float | str]: ...

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        """The groups that something can be learned from; the others are counted by reason."""
        ...

    def lessons(self, groups: Sequence[TrajectoryGroup]) -> list[Lesson]:
        """Everything that one optimizer step learns from these groups; normalisers count over all of them."""
        ...


def datums_of(lessons: Sequence[Lesson]) -> list[Datum]:
    return [datum for lesson in lessons for datum in lesson.datums]
