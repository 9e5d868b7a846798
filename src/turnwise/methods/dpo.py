"""DPO over whole dialogues: prefer the best of several attempts at a task to the worst (arXiv:2305.18290, 2404.12358).

    Delta = sum over the policy's tokens of the better one of w log(p / ref), minus the same of the worse one
    L     = -log sigmoid(beta Delta), its mean over the pairs of a step

The sums do not include the world's words. w = 1, or DMPO's weight of the turn (`turn_weights: dmpo`, arXiv:2406.14868).
`reward_offset` asks for a margin in proportion to the difference in reward. The reference is the policy that sampled,
or the base model. All attempts at a task start in the same world, so a pair differs only by what the policy said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.credit.preferences import PreferencePair, best_and_worst, dmpo_weights, side_to_datums
from turnwise.errors import DataError
from turnwise.losses.table import DpoOptions
from turnwise.methods.base import (
    PLAY_GROUPS,
    Kept,
    Lesson,
    MethodSetup,
    PlayGroups,
    ReadPairs,
    Values,
    keep_by,
    why_unusable,
)
from turnwise.methods.refuel import Referenced, forget_attempt, pair_lesson
from turnwise.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsToLessons:
    """Makes the two lessons of each pair."""

    dmpo_gamma: float | None = None
    """None gives all turns the same weight."""
    uses_sampler: bool = True
    """Whether the reference is the policy that sampled; otherwise it is the base model."""

    def __call__(self, pairs: Sequence[PreferencePair]) -> list[Lesson]:
        lessons: list[Lesson] = []
        for number, pair in enumerate(pairs, start=1):
            for sign, trajectory in ((1, pair.chosen), (-1, pair.rejected)):
                reward = sign * pair.reward_difference / 2
                datums = side_to_datums(
                    trajectory,
                    sign * number,
                    reward=reward,
                    weight=1 / len(pairs),
                    turn_weights=self._turn_weights(len(trajectory.turns)),
                    with_reference=self.uses_sampler,
                )
                lessons.append(pair_lesson(trajectory, reward, datums))
        return lessons

    def _turn_weights(self, num_turns: int) -> list[float] | None:
        return None if self.dmpo_gamma is None else dmpo_weights(num_turns, gamma=self.dmpo_gamma).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo:
    """Pairs from the attempts that are played for each step."""

    class Options(Referenced, DpoOptions):
        """DPO: prefer the best attempt at a task to the worst."""

        name: str = "dpo"
        turn_weights: Literal["none", "dmpo"] = Field(
            default="none", description="Whether all turns count the same, or later turns count less, as in DMPO."
        )
        dmpo_gamma: float = Field(default=0.7, gt=0, le=1, description="DMPO's discount per turn.")

        default_loss = "dpo"
        data_options = ("pairs",)

        def build(self, setup: MethodSetup) -> Dpo | StoredDpo:
            read = PairsToLessons(
                dmpo_gamma=self.dmpo_gamma if self.turn_weights == "dmpo" else None, uses_sampler=self.uses_sampler
            )
            if setup.data.pairs:
                return StoredDpo(source=ReadPairs(path=setup.data.pairs), loss_config=self.loss_config, read=read)
            return Dpo(loss_config=self.loss_config, read=read)

        def why_not_own_worlds(self) -> str | None:
            return "prefers one attempt to another, and between two worlds it would prefer the luckier one"

        @model_validator(mode="after")
        def _dmpo_gamma_is_read(self) -> Self:
            if self.dmpo_gamma != type(self).model_fields["dmpo_gamma"].default and self.turn_weights != "dmpo":
                raise ValueError(f"dmpo_gamma is not read by turn_weights={self.turn_weights}; set turn_weights: dmpo")
            return self

    loss_config: Mapping[str, float | str]
    read: PairsToLessons = PairsToLessons()
    source: PlayGroups = PLAY_GROUPS
    loss_fn: str = "dpo"
    needs_values: bool = False

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        return keep_by(_why_dropped, groups)

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:  # noqa: ARG002
        return self.read([pair for group in groups if (pair := best_and_worst(group)) is not None])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDpo:
    """Pairs from a file."""

    source: ReadPairs
    loss_config: Mapping[str, float | str]
    read: PairsToLessons = PairsToLessons()
    loss_fn: str = "dpo"

    def lessons(self, items: Sequence[PreferencePair]) -> list[Lesson]:
        return [forget_attempt(lesson) for lesson in self.read(items)]


def _why_dropped(group: TrajectoryGroup) -> str | None:
    unusable = why_unusable(group)
    if unusable is not None:
        return unusable
    try:
        pair = best_and_worst(group)
    except DataError:  # the env begins differently with the same seed
        return "different_starts"
    if pair is None:
        return "constant"
    if not all(any(turn.is_trained for turn in t.turns) for t in (pair.chosen, pair.rejected)):
        return "masked"
    return "identical" if pair.is_identical else None
