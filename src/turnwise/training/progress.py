"""Whether there is still something to learn: a row of steps without a gradient ends a run, well or with an error."""

from __future__ import annotations

from collections import Counter

from turnwise.errors import TurnwiseError
from turnwise.training.run_state import RunState
from turnwise.training.supply import Batch

SOLVED = "solved"
MAX_SILENT_STEPS = 20
"""Steps in a row in which no attempt drew a token: a bound on tokens would never end such a run."""


class NothingToLearnError(TurnwiseError):
    """Step after step left nothing to learn from."""


class TokensSpentError(TurnwiseError):
    """The bound on sampled tokens left nothing for the first step."""

    def __init__(self, num_drawn: int, bound: int, num_steps: int) -> None:
        super().__init__(
            f"no step of {num_steps} was made: the critic's pre-training sampled {num_drawn:,} tokens, and "
            f"train.max_sampled_tokens={bound}. The run is saved; go on with a larger bound, or start one with fewer "
            "batches of it (critic.pretrain_steps) or from stored attempts (critic.pretrain_from)"
        )


class Progress:
    """Counts the steps in a row that left nothing to learn from, and why."""

    def __init__(self, max_empty_steps: int) -> None:
        self._max_empty_steps = max_empty_steps
        self._num_silent_steps = 0
        self.num_empty_steps = 0
        self.why_empty: Counter[str] = Counter()

    def restore(self, state: RunState) -> None:
        self.num_empty_steps, self.why_empty = state.num_empty_steps, Counter(state.why_empty)

    @property
    def is_solved(self) -> bool:
        """Nothing was left to learn for so long because every attempt succeeded."""
        return self.num_empty_steps >= self._max_empty_steps and set(self.why_empty) == {SOLVED}

    def check(self, batch: Batch, *, is_empty: bool) -> None:
        """A step without a gradient is passed over; a row of them is an error, unless the tasks are solved."""
        if not is_empty:
            self.num_empty_steps = self._num_silent_steps = 0
            self.why_empty.clear()
            return
        self.num_empty_steps += 1
        self._num_silent_steps = 0 if batch.played.stats.num_drawn else self._num_silent_steps + 1
        self.why_empty.update(_reasons(batch))
        is_silent = batch.taken is not None and self._num_silent_steps >= MAX_SILENT_STEPS
        if is_silent or (self.num_empty_steps >= self._max_empty_steps and not self.is_solved):
            raise NothingToLearnError(self._explain(batch))

    def _explain(self, batch: Batch) -> str:
        reasons = ", ".join(f"{count} {why}" for why, count in self.why_empty.most_common()) or "no groups at all"
        dropped = batch.played.dropped
        failed = next((one.failure for group in dropped for one in group.failed if one.failure), None)
        left_alone = next((group.detail for group in dropped if group.why == "quarantined"), None)
        advice = (
            "Groups in which every attempt gets the same reward teach nothing: warm up first (warmup.steps=50), "
            "make the task easier, or play more attempts (rollout.group_size)"
        )
        if failed is not None:
            advice = f"Attempts fail, the last time by {failed.party}: {failed.detail}"
        elif left_alone is not None:
            advice = f"Tasks that keep failing are not played again: {left_alone}"
        return f"{self.num_empty_steps} steps in a row left nothing to learn from (groups: {reasons}). {advice}"


def _reasons(batch: Batch) -> Counter[str]:
    """How many groups went for which reason; those in which all succeeded are solved, not merely constant."""
    reasons = Counter(batch.kept.dropped)
    reasons.update(group.why for group in batch.played.dropped)
    if batch.kept.groups:  # a critic foresaw everything in them
        reasons["without an advantage"] += len(batch.kept.groups)
    groups = batch.played.groups
    if groups and all(one.is_success for group in groups for one in group.trajectories):
        solved = reasons.pop("constant", 0) + reasons.pop("without an advantage", 0)
        reasons[SOLVED] += solved
    return +reasons
