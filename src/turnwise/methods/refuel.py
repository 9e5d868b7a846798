"""REFUEL: regress the policy's log-ratio between two continuations on their difference in reward (arXiv:2410.04612).

    Delta = [log p(y) - log p_t(y)] - [log p(y') - log p_t(y')]       y, y': turn h of two continuations of one dialogue
    L     = (Delta / eta - (R - R'))^2                                 its mean over the pairs of a step

p_t is the policy that sampled; its logprobs came with the tokens. At the optimum Delta = eta (R - R'), a natural policy
gradient step; a constant in both rewards does not matter. Only turn h is trained. N continuations of one dialogue form
N / 2 pairs with each attempt in one of them; the pairing does not look at rewards. Pairs that said the same at turn h,
or got the same reward, teach nothing and are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from turnwise.credit.advantages import is_constant_group
from turnwise.credit.branching import train_turns
from turnwise.credit.preferences import PreferencePair, disjoint_pairs, side_to_datums
from turnwise.losses.table import RefuelOptions
from turnwise.methods.base import Kept, Lesson, MethodSetup, PlayBranches, ReadPairs, Values, keep_by, why_unusable
from turnwise.methods.la_grpo import Branching
from turnwise.methods.options import MethodOptions
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import Datum


class Referenced(MethodOptions):
    """A method whose loss takes log-ratios against a reference."""

    reference: Literal["sampler", "base"] = Field(
        default="sampler",
        description="The policy to take log-ratios against: the one that sampled, or the base model.",
    )

    @property
    def uses_sampler(self) -> bool:
        return self.reference == "sampler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuel:
    """Pairs of continuations, played for each step."""

    class Options(Branching, Referenced, RefuelOptions):
        """REFUEL: regress log-ratios between two continuations on their difference in reward."""

        name: str = "refuel"

        default_loss = "refuel"
        data_options = ("pairs",)

        def build(self, setup: MethodSetup) -> Refuel | StoredRefuel:
            if setup.data.pairs:
                return StoredRefuel(
                    source=ReadPairs(path=setup.data.pairs, only_branch_turn=True),
                    loss_config=self.loss_config,
                    uses_sampler=self.uses_sampler,
                )
            return Refuel(
                source=self.branch_source(setup), loss_config=self.loss_config, uses_sampler=self.uses_sampler
            )

        def why_not_group_size(self, num_attempts: int) -> str | None:
            if num_attempts % 2:
                return (
                    "pairs the continuations of a dialogue two by two, and one would be left over; expected an even "
                    "number"
                )
            return None

    source: PlayBranches
    loss_config: Mapping[str, float | str]
    uses_sampler: bool = True
    loss_fn: str = "refuel"
    needs_values: bool = False

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        return keep_by(_why_dropped, groups)

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:  # noqa: ARG002
        pairs = [pair for group in groups for pair in disjoint_pairs(group) if _why_no_pair(pair) is None]
        return refuel_lessons(pairs, uses_sampler=self.uses_sampler)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRefuel:
    """Pairs of continuations from a file."""

    source: ReadPairs
    loss_config: Mapping[str, float | str]
    uses_sampler: bool = True
    loss_fn: str = "refuel"

    def lessons(self, items: Sequence[PreferencePair]) -> list[Lesson]:
        return [forget_attempt(lesson) for lesson in refuel_lessons(items, uses_sampler=self.uses_sampler)]


def refuel_lessons(pairs: Sequence[PreferencePair], *, uses_sampler: bool) -> list[Lesson]:
    lessons: list[Lesson] = []
    for number, pair in enumerate(pairs, start=1):
        for sign, trajectory in ((1, pair.chosen), (-1, pair.rejected)):
            trained = train_turns(trajectory, pair.branch_turn, pair.branch_turn)
            reward = sign * pair.reward_difference / 2
            datums = side_to_datums(
                trained, sign * number, reward=reward, weight=1 / len(pairs), with_reference=uses_sampler
            )
            lessons.append(pair_lesson(trained, reward, datums))
    return lessons


def pair_lesson(trajectory: Trajectory, reward: float, datums: Sequence[Datum]) -> Lesson:
    return Lesson(trajectory=trajectory, advantages=(reward,) * len(trajectory.turns), datums=tuple(datums))


def forget_attempt(lesson: Lesson) -> Lesson:
    """Remove the attempt from a lesson: this run did not play a stored pair and must not record it as an attempt."""
    return replace(lesson, trajectory=None)


def _why_no_pair(pair: PreferencePair) -> str | None:
    """Why a pair teaches nothing, or None."""
    sides = [side.turns[pair.branch_turn] for side in (pair.chosen, pair.rejected)]
    if not all(side.is_trained for side in sides):
        return "masked"
    if is_constant_group([pair.chosen.total_reward, pair.rejected.total_reward]):
        return "constant"
    return "identical" if sides[0].sampled_ids == sides[1].sampled_ids else None


def _why_dropped(group: TrajectoryGroup) -> str | None:
    """Drop a group when no pair is left; the reason is the most frequent one of its pairs."""
    unusable = why_unusable(group)
    if unusable is not None:
        return unusable
    reasons = [_why_no_pair(pair) for pair in disjoint_pairs(group)]
    return None if None in reasons else Counter(reasons).most_common(1)[0][0]
