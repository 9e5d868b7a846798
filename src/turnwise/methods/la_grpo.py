"""LA-GRPO: local advantages. Play one dialogue up to turn h, then several continuations, and train only turn h.

    A_j = R_j - mean(R) over the continuations of one dialogue       the turns of attempt j that are trained get it

Everything before turn h is the same for the whole group and cancels, so the advantage belongs to turn h alone. Training
the shared turns would add exactly nothing, because the advantages sum to 0. The price is that only one turn of many is
trained. `trained_turns: from_branch` trains turn h and all later ones. `divide_by_probability` weights a group by
1 / P(h), so that the expected gradient is the sum over all turns. A dialogue that ends before turn h is then skipped,
because it has no turn h, but it still counts in the normaliser: of dialogues with T of at most H turns, T / H reach
their turn h, so each of those has weight (1 / P(h)) T / H = T and not H.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.credit.advantages import center_by_group
from turnwise.credit.branching import train_turns, trim_tail
from turnwise.credit.weights import Weighting, token_mean
from turnwise.methods.base import (
    Credited,
    Kept,
    Lesson,
    MethodSetup,
    PlayBranches,
    Values,
    keep_by,
    make_lessons,
    why_unusable,
)
from turnwise.methods.grpo import Compared, Comparison
from turnwise.methods.options import FreeLoss, MethodOptions, Weighed
from turnwise.trajectory import TrajectoryGroup
from turnwise.types import Datum, TensorData


class Branching(MethodOptions):
    """A method that continues one dialogue several times."""

    branch_turn: Literal["uniform", "geometric"] = Field(
        default="uniform", description="How to draw the turn to branch at."
    )
    branch_p: float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="Parameter of the geometric distribution over turns; a larger value draws earlier turns.",
    )

    branches = True

    def branch_source(self, setup: MethodSetup, *, redraw: bool = True) -> PlayBranches:
        return PlayBranches(continuations=setup.group_size, turn=self.branch_turn, p=self.branch_p, redraw=redraw)

    @model_validator(mode="after")
    def _branch_p_is_read(self) -> Self:
        if self.branch_p != type(self).model_fields["branch_p"].default and self.branch_turn != "geometric":
            raise ValueError(f"branch_p is not read by branch_turn={self.branch_turn}; set branch_turn: geometric")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class LaGrpo:
    """Group-relative advantages among continuations of the same dialogue."""

    class Options(Compared, Branching, FreeLoss, Weighed):
        """LA-GRPO: compare continuations of one dialogue, and train the turn that they differ in."""

        name: str = "la_grpo"
        trained_turns: Literal["branch", "from_branch"] = Field(
            default="branch", description="Train only the turn of the branch, or that turn and all later ones."
        )
        divide_by_probability: bool = Field(
            default=False,
            description="Weight a group by 1 / P(its turn), which gives the gradient of the sum over all turns.",
        )

        def build(self, setup: MethodSetup) -> LaGrpo:
            return LaGrpo(
                source=self.branch_source(setup, redraw=not self.divide_by_probability),
                loss_fn=self.loss,
                loss_config=self.loss_config,
                compare=self.compare,
                weigh=self.weighting(setup),
                trains_later_turns=self.trained_turns == "from_branch",
                divides_by_probability=self.divide_by_probability,
            )

    source: PlayBranches
    loss_fn: str
    loss_config: Mapping[str, float | str]
    compare: Comparison = center_by_group
    weigh: Weighting = token_mean
    trains_later_turns: bool = False
    divides_by_probability: bool = False
    needs_values: bool = False

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        return keep_by(self._why_dropped, groups)

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:  # noqa: ARG002
        credited: list[list[Credited]] = []
        for group in groups:
            group = self.trained_part(group)
            advantages_G = self.compare(group.rewards)
            credited.append(
                [(t, [float(a)] * len(t.turns)) for t, a in zip(group.trajectories, advantages_G, strict=True)]
            )
        lessons = make_lessons(credited, self.weigh)
        factors = [self._factor(group) for group in groups for _ in group.trajectories]
        return [
            replace(lesson, datums=tuple(_scaled(trim_tail(datum), factor) for datum in lesson.datums))
            for lesson, factor in zip(lessons, factors, strict=True)
        ]

    def trained_part(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group with only the turns in the loss that this method trains; other turns are masked."""
        first = branch_turn(group)
        last = None if self.trains_later_turns else first
        return replace(group, trajectories=tuple(train_turns(t, first, last) for t in group.trajectories))

    def _factor(self, group: TrajectoryGroup) -> float:
        return group.branched_share / group.branch_probability if self.divides_by_probability else 1.0

    def _why_dropped(self, group: TrajectoryGroup) -> str | None:
        unusable = why_unusable(self.trained_part(group))
        if unusable is not None:
            return unusable
        return None if self.compare(group.rewards).any() else "constant"


def branch_turn(group: TrajectoryGroup) -> int:
    assert group.branch_turn is not None, "the group was not branched"
    return group.branch_turn


def _scaled(datum: Datum, factor: float) -> Datum:
    if factor == 1:
        return datum
    weights = datum.loss_fn_inputs["weights"].to_numpy() * factor
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": TensorData(weights.tolist())})
