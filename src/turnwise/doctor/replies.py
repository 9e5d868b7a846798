"""What is wrong with the replies: cut, unreadable, all the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from turnwise.doctor.finding import Finding, Fix, shortened
from turnwise.doctor.history import RunHistory
from turnwise.trajectory import Trajectory, Turn

BAD_SHARE = 0.3
"""Share of replies from which on it is the replies that keep a policy from learning."""
CUT_LEFT = 0.05
"""Share of replies that may still be cut at the limit that is proposed."""
MAX_GROWTH = 16
"""The largest factor by which a limit is proposed to grow."""


def replies_cut(run: RunHistory) -> Finding | None:
    """Replies end at their token limit, and these attempts do worse for it."""
    turns = [turn for one in run.trajectories for turn in one.turns]
    cut = [turn for turn in turns if turn.is_cut]
    share = len(cut) / max(1, len(turns))
    if share < BAD_SHARE or run.is_solving or not _does_harm(run.trajectories):
        return None
    limit = max(len(turn.sampled_ids) for turn in cut)
    value, how = _fitting_limit(limit, share)
    is_context = any(len(turn.sampled_ids) < limit for turn in cut) and _fills_context(run, cut)
    option = "rollout.max_trajectory_tokens" if is_context else "rollout.max_tokens_per_turn"
    fixes = [Fix(option=f"{option}={value}", text=how)]
    if run.config.rollout.max_tokens_per_turn and not is_context:
        fixes.insert(0, Fix(option="rollout.max_tokens_per_turn=0", text="take the world's own limit"))
    if share > 0.98:
        fixes += _warm_up(run, "no reply ends by itself: show the model how a reply ends")
    return Finding(
        name="replies_cut",
        seen=f"{share:.0%} of {len(turns)} replies were cut at their limit of {limit} tokens",
        why="a reply that is cut has not said what it was going to say: the env cannot read it, or judges half of it",
        fixes=tuple(fixes),
        evidence=_example(cut),
        numbers={"share": share, "limit": limit, "value": value},
    )


def replies_unparsable(run: RunHistory) -> Finding | None:
    """The env cannot read the replies."""
    turns = [turn for one in run.trajectories for turn in one.turns]
    bad = [turn for turn in turns if turn.is_unparsable]
    share = len(bad) / max(1, len(turns))
    if share < BAD_SHARE or run.is_solving or _is_falling(run):
        return None
    num_cut = sum(turn.is_cut for turn in bad)
    fixes = [
        *_warm_up(run, "show the form of a reply before training"),
        Fix(option="rollout.unparsable_penalty=0.1", text="give an unreadable reply less than a wrong one"),
        Fix(text="say the expected form in the first message, with one example"),
    ]
    if num_cut > len(bad) / 2:
        limit = max(len(turn.sampled_ids) for turn in bad)
        value, how = _fitting_limit(limit, num_cut / len(bad))
        fixes.insert(0, Fix(option=f"rollout.max_tokens_per_turn={value}", text=f"most of them were cut: {how}"))
    return Finding(
        name="replies_unparsable",
        seen=f"the env could not read {share:.0%} of {len(turns)} replies",
        why="an unreadable reply changes nothing in the world, so good and bad intentions earn the same",
        fixes=tuple(fixes),
        evidence=_example(bad),
        numbers={"share": share, "cut_share": num_cut / len(bad)},
    )


def replies_identical(run: RunHistory) -> Finding | None:
    """The attempts of a group say the same, token by token."""
    same = [group for group in run.groups if len({_said(one) for one in group}) == 1]
    share = len(same) / max(1, len(run.groups))
    if len(run.groups) < 2 or share < 0.5 or run.is_solving:
        return None
    temperature = run.config.rollout.temperature
    fixes = (
        [Fix(option="rollout.temperature=1.0", text="sample from the whole distribution")]
        if temperature < 0.5
        else [
            Fix(option="method.entropy_coef=0.001", text="pay for varied replies"),
            Fix(option=f"train.learning_rate={run.config.train.learning_rate / 10:g}", text="start again, slower"),
        ]
    )
    return Finding(
        name="replies_identical",
        seen=f"in {share:.0%} of {len(run.groups)} groups all attempts say the same, at temperature {temperature:g}",
        why="a group teaches by the difference of its attempts; equal attempts have none",
        fixes=tuple(fixes),
        evidence=_example(same[0][0].turns[:1]),
        numbers={"share": share, "temperature": temperature},
    )


def _warm_up(run: RunHistory, text: str) -> list[Fix]:
    """Advise a warm-up; a longer one if the run had one."""
    return [Fix(option=f"warmup.steps={4 * run.config.warmup.steps or 50}", text=text)]


def _said(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    return tuple(turn.sampled_ids for turn in trajectory.turns)


def _does_harm(trajectories: list[Trajectory]) -> bool:
    """Whether attempts with a cut reply earn less than others; where every attempt has one, whether few succeed."""
    cut = [one for one in trajectories if one.is_cut]
    whole = [one for one in trajectories if not one.is_cut]
    if len(whole) >= len(trajectories) / 10:
        return fmean(one.total_reward for one in cut) < fmean(one.total_reward for one in whole)
    judged = [one for one in trajectories if one.is_success is not None]
    return not judged or fmean(float(one.is_success is True) for one in judged) < 0.5


def _is_falling(run: RunHistory) -> bool:
    """Whether the number of unreadable replies is half of what it was at first, so that the policy learns the form."""
    counts = run.values("rollout/unparsable_replies")
    return len(counts) >= 6 and fmean(counts[-3:]) < fmean(counts[:3]) / 2


def _fitting_limit(limit: int, cut_share: float) -> tuple[int, str]:
    """A limit at which few replies would be cut, if each further token ends as many as those so far."""
    if cut_share > 0.98:
        return limit * 4, "four times the limit; whether that is enough is not known, because every reply was cut"
    factor = min(MAX_GROWTH, math.log(CUT_LEFT) / math.log(cut_share))
    value = math.ceil(limit * factor / 8) * 8
    return value, f"about {CUT_LEFT:.0%} of replies would still be cut, if lengths go on as they are"


def _fills_context(run: RunHistory, cut: list[Turn]) -> bool:
    """Whether most cut replies ended because the attempt had no tokens left."""
    limit = run.config.rollout.max_trajectory_tokens
    full = [turn for turn in cut if limit and len(turn.prompt_ids) + len(turn.sampled_ids) >= limit]
    return len(full) > len(cut) / 2


def _example(turns: Sequence[Turn]) -> str:
    """The last of these turns that the env answered."""
    turn = next((one for one in reversed(turns) if one.observation), turns[-1])
    answer = " / ".join(message.content for message in turn.observation)
    said = f"the reply: {turn.reply.content.strip()!r}"
    return shortened(f"{said}\nthe env's answer: {answer!r}" if answer else said)
