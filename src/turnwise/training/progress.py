"""How far a run has come: tokens that it sampled, the learning rate of a step, whether anything is left to learn.

Tokens are counted from the metrics of the run:

    rollout/tokens_drawn     per step: by the groups that it took, and by those that it dropped for their age
    critic/sampled_tokens    per batch of the critic's pre-training
    pool/tokens_drawn        after a step: by groups that no step has taken yet, those that are being played included

Evaluations are not counted. What a process drew after its last checkpoint is drawn again when the run goes on, with
the same tasks and seeds, and counts once.

The learning rate of a step:

    rate = learning_rate * min(1, (step + 1) / lr_warmup) * decay(p)

    constant   decay = 1
    linear     decay = 1 - (1 - lr_floor) p
    cosine     decay = lr_floor + (1 - lr_floor) (1 + cos(pi p)) / 2

p is the share of the run that is done, by steps or by sampled tokens, whichever is further: 0 before the first step.
Tokens that a critic's pre-training took cannot be spent again, so they leave the bound before the share is taken. The
rate depends on the config, the step and the tokens drawn so far alone. So a resumed run goes on with the same rates,
and one whose `train.steps` or `train.learning_rate` was changed follows the new schedule from there.

A row of steps without a gradient ends a run: well if every attempt succeeded, else with an error (`Progress`).
"""

from __future__ import annotations

import math
from collections import Counter

from turnwise.config.training import TrainConfig
from turnwise.credit.branching import pooled_branch_share
from turnwise.errors import Party, TurnwiseError
from turnwise.rollout.stats import FirstFailures
from turnwise.runlog.reader import RunReader
from turnwise.training.checkpoint import RunState
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

    def __init__(self, max_empty_steps: int, failures: FirstFailures | None = None) -> None:
        """If failed attempts end the run, the first exception of `failures` is named as the cause."""
        self._failures = failures or FirstFailures()
        self._max_empty_steps = max_empty_steps
        self._num_silent_steps = 0
        self.num_empty_steps = 0
        self.why_empty: Counter[str] = Counter()

    def restore(self, state: RunState) -> None:
        self.num_empty_steps, self.why_empty = state.num_empty_steps, Counter(state.why_empty)

    @property
    def is_solved(self) -> bool:
        """The last steps had nothing to learn from, because every attempt succeeded."""
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
            raise NothingToLearnError(self._explain(batch)) from self._failures.first

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

    def check_any_judged(self, run: RunReader) -> None:
        """Raise an error if all attempts of the run failed: nothing was learned, and nothing was measured."""
        totals = {
            name: sum(value for _, value in run.metric(name)) for name in run.metric_names() if "rollout/" in name
        }
        lost = [name for name in totals if name.endswith("_failed") and name.startswith("rollout/dropped_")]
        num_lost = sum(totals[name] for name in lost) + totals.get("rollout/dropped_quarantined", 0.0)
        if not num_lost or totals.get("rollout/attempts", 0.0) > num_lost:
            return
        told = run.events("first_failure")
        first = f"; the first time by {told[0].detail['party']}: {told[0].detail['detail']}" if told else ""
        is_env = bool(told) and told[0].detail["party"] == Party.ENV
        checked = "; `turnwise check-env` finds most mistakes of an env in seconds" if is_env else ""
        raise NothingToLearnError(
            f"all {num_lost:.0f} attempts of the run failed, so nothing was learned{first}. Mend that and start a new "
            f"run{checked}"
        ) from self._failures.first

    def why_not_moved(self, run: RunReader, *, num_updates: int) -> str | None:
        """Why no step of the run moved the weights; None if one did."""
        norms = [value for _, value in run.metric("train/grad_norm")]
        if num_updates:
            return "every gradient was exactly 0" if norms and not any(norms) else None
        reasons = ", ".join(f"{count} groups {why}" for why, count in self.why_empty.most_common())
        return reasons or "no step had anything to learn from"


def _reasons(batch: Batch) -> Counter[str]:
    """How many groups went for which reason; those in which all succeeded are solved, not merely constant."""
    reasons = Counter(batch.kept.dropped)
    reasons.update(group.why for group in batch.played.dropped)
    if batch.kept.groups:  # a critic foresaw everything in them, or the method made no lesson of them
        reasons["without an advantage"] += len(batch.kept.groups)
    groups = batch.played.groups
    if groups and all(one.is_success for group in groups for one in group.trajectories):
        solved = reasons.pop("constant", 0) + reasons.pop("without an advantage", 0)
        reasons[SOLVED] += solved
    return +reasons


def rate_factor(train: TrainConfig, step: int, num_drawn: int, num_before: int = 0) -> float:
    """What the full learning rates are multiplied by in the step after `step` steps and `num_drawn` tokens.

    Args:
        num_before: those of the tokens that were drawn before the first step.
    """
    rise = min(1.0, (step + 1) / train.lr_warmup) if train.lr_warmup else 1.0
    return rise * _decay(train, progress(train, step, num_drawn, num_before))


def progress(train: TrainConfig, step: int, num_drawn: int, num_before: int = 0) -> float:
    """The share of the run that is done, from 0 to 1."""
    by_steps = step / train.steps if train.steps else 0.0
    bound = train.max_sampled_tokens - num_before
    by_tokens = (num_drawn - num_before) / bound if train.max_sampled_tokens and bound > 0 else 0.0
    return min(1.0, max(by_steps, by_tokens))


def _decay(train: TrainConfig, done: float) -> float:
    match train.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - (1 - train.lr_floor) * done
        case "cosine":
            return train.lr_floor + (1 - train.lr_floor) * (1 + math.cos(math.pi * done)) / 2


def num_taken_tokens(run: RunReader, step: int, *, critic_batches: int | None = None) -> int:
    """Tokens that the steps up to `step` took, and the critic's pre-training.

    Args:
        critic_batches: how many batches of the pre-training count; None: all that are on record.
    """
    steps = sum(value for at, value in run.metric("rollout/tokens_drawn") if at <= step)
    batches = run.metric("critic/sampled_tokens")
    critic = sum(value for at, value in batches if critic_batches is None or at <= critic_batches)
    return round(steps + critic)


def branch_share_of(run: RunReader) -> float | None:
    """Var(R | prefix) / Var(R) of a stored run over all its steps; None if its method does not branch."""
    shares, totals = (dict(run.metric(f"method/branch_variance_{name}")) for name in ("share", "total"))
    return pooled_branch_share(shares, totals)


def num_drawn_tokens(run: RunReader, step: int) -> int:
    """All tokens that were sampled for training by the time that `step` steps were done, learned from or not."""
    waiting = dict(run.metric("pool/tokens_drawn"))
    return num_taken_tokens(run, step) + round(waiting.get(step, 0.0))
