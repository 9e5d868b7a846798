"""Runs that move, but not towards the goal: rewards without success, train tasks learned by heart, a blind critic."""

from __future__ import annotations

import math
from statistics import fmean, median

from turnwise.doctor.finding import Finding, Fix
from turnwise.doctor.history import RECENT_STEPS, RunHistory
from turnwise.trajectory import REWARD_PARTS
from turnwise.watch.trends import STRETCH_STEPS, has_fallen, has_risen

FLAT = 0.02
"""A success rate that rose by no more than this is flat."""


def reward_hacked(run: RunHistory) -> Finding | None:
    """The reward rises and success does not: the policy is paid for something else."""
    rewards, successes = run.values("rollout/reward_mean"), run.values("rollout/success_mean")
    if min(len(rewards), len(successes)) < 2 * STRETCH_STEPS or run.is_solving:
        return None
    first, last = rewards[:STRETCH_STEPS], rewards[-STRETCH_STEPS:]
    before, after = fmean(successes[:STRETCH_STEPS]), fmean(successes[-STRETCH_STEPS:])
    rise = fmean(last) - fmean(first)
    if not has_risen(first, last) or after - before > FLAT or rise < 0.05 * max(abs(fmean(first)), 0.1):
        return None
    channel, gained = _largest_rise(run)
    return Finding(
        name="reward_hacked",
        seen=f"the reward rose from {fmean(first):.3g} to {fmean(last):.3g}, and success went from {before:.0%} to "
        f"{after:.0%}; most of the rise is in the channel {channel} ({gained:+.3g})",
        why="the policy found something that is paid and is not the task",
        fixes=(
            Fix(option=f"reward.weights.{channel}=0.1", text=f"pay less for {channel}, or only with a success"),
            Fix(text="read some dialogues: turnwise replay RUN --attempt ID, of the last step"),
        ),
        evidence=_best_paid(run),
        numbers={"reward_rise": rise, "success_rise": after - before},
    )


def overfits(run: RunHistory) -> Finding | None:
    """Training tasks are solved, and held-out ones are not."""
    rows = [row for row in run.evaluations if math.isfinite(row.success)]
    trained = run.values("rollout/success_mean", last=STRETCH_STEPS)
    if len(rows) < 2 or len(trained) < 2 or not run.steps:
        return None
    last, first = rows[-1], rows[0]
    gap = fmean(trained) - last.success
    if gap < 0.25 or fmean(trained) <= last.success_high or last.success_low > first.success_high:
        return None
    num_tasks = run.config.train.num_tasks
    return Finding(
        name="overfits",
        seen=f"{fmean(trained):.0%} of the attempts of training succeed, and {last.success:.0%} of those on held-out "
        f"tasks, as before training ({first.success:.0%})",
        why="the policy learned the training tasks by heart, not what they have in common",
        fixes=(
            Fix(option=f"train.num_tasks={8 * num_tasks}", text=f"more tasks than {num_tasks}, if the world has them"),
            Fix(option="train.steps=" + str(max(1, len(run.steps) // 2)), text="stop earlier"),
            Fix(text="see that train and held-out tasks are of one kind"),
        ),
        numbers={"train": fmean(trained), "held_out": last.success},
    )


def warmup_hurts(run: RunHistory) -> Finding | None:
    """The warm-up made the policy worse."""
    by_label = {row.label: row for row in run.evaluations}
    start, warm = by_label.get("start"), by_label.get("warm-up")
    if start is None or warm is None or not warm.success_high < start.success_low:
        return None
    rate = run.config.warmup.learning_rate
    return Finding(
        name="warmup_hurts",
        seen=f"held-out success was {start.success:.0%} before the warm-up and {warm.success:.0%} after it",
        why="the demonstrations are worse than the policy, or the steps on them were too large",
        fixes=(
            Fix(option="warmup.steps=0", text="train from the model as it is"),
            Fix(option=f"warmup.learning_rate={rate / 10:g}", text=f"a tenth of {rate:g}"),
        ),
        numbers={"before": start.success, "after": warm.success},
    )


def critic_blind(run: RunHistory) -> Finding | None:
    """The critic's values explain nothing of the returns of attempts."""
    values = run.values("train/critic_explained_variance")
    recent = values[-RECENT_STEPS:]
    if len(values) < STRETCH_STEPS or median(recent) > 0 or run.is_solving:
        return None
    pretrain = max(20, 2 * run.config.critic.pretrain_steps)
    return Finding(
        name="critic_blind",
        seen=f"the critic explains {median(recent):.0%} of the variance of returns in the last {len(recent)} steps",
        why="advantages are then the returns minus a wrong guess, with more noise than without a critic",
        fixes=(
            Fix(option=f"critic.pretrain_steps={pretrain}", text="let it learn alone first"),
            Fix(option="method=grpo", text="compare attempts of a group; no critic is needed"),
        ),
        numbers={"explained_variance": median(recent)},
    )


def penalty_rules(run: RunHistory) -> Finding | None:
    """Replies grow shorter to avoid a penalty, and success does not rise."""
    lengths, penalties = run.values("rollout/sampled_tokens_per_turn_mean"), run.values("rollout/reward_penalty_mean")
    successes = run.values("rollout/success_mean")
    if min(len(lengths), len(penalties)) < 2 * STRETCH_STEPS or run.is_solving:
        return None
    first, last = lengths[:STRETCH_STEPS], lengths[-STRETCH_STEPS:]
    rose = len(successes) >= 2 * STRETCH_STEPS and fmean(successes[-STRETCH_STEPS:]) - fmean(successes[:STRETCH_STEPS])
    outcome = abs(run.recent("rollout/reward_outcome_mean") or 0.0)
    if not has_fallen(first, last) or fmean(last) > fmean(first) / 2 or (rose or 0.0) > FLAT:
        return None
    if abs(fmean(penalties[:STRETCH_STEPS])) < outcome:
        return None
    return Finding(
        name="penalty_rules",
        seen=f"replies shrank from {fmean(first):.0f} to {fmean(last):.0f} tokens; penalties were "
        f"{fmean(penalties[:STRETCH_STEPS]):.3g} at first, against {outcome:.3g} for the outcome",
        why="saying little costs least, and it is the quickest thing to learn",
        fixes=(
            Fix(option="reward.weights.penalty=0.1", text="let the outcome weigh more than the penalty"),
            Fix(text="give the penalty only to attempts that succeed"),
        ),
        numbers={"tokens_first": fmean(first), "tokens_last": fmean(last)},
    )


def _largest_rise(run: RunHistory) -> tuple[str, float]:
    """The channel of the reward that rose most, and by how much."""
    rises: dict[str, float] = {}
    for channel in REWARD_PARTS:
        values = run.values(f"rollout/reward_{channel}_mean")
        if len(values) >= 2 * STRETCH_STEPS:
            rises[channel] = fmean(values[-STRETCH_STEPS:]) - fmean(values[:STRETCH_STEPS])
    return max(rises.items(), key=lambda item: item[1], default=("outcome", 0.0))


def _best_paid(run: RunHistory) -> str:
    """What an attempt said that earned much and did not succeed."""
    lost = [one for one in run.trajectories if not one.is_success]
    if not lost:
        return ""
    best = max(lost, key=lambda one: one.total_reward)
    said = "\n".join(
        f"reply {number}: {turn.reply.content.strip()!r:.160}" for number, turn in enumerate(best.turns[:3], 1)
    )
    return f"{said}\nreward {best.total_reward:g}, no success"
