"""How the policy behaves over training: where in an attempt it is unsure, how varied its actions are, how often they
fail. These numbers say whether a policy explores, settles, or goes round in circles; none of them is a score.

Entropy is minus the mean logprob of sampled tokens. `entropy_metrics` has one number for all replies, one for each turn
of an attempt, and one for each kind of reply. A policy that collapses often does so in one place first: in late turns,
which few attempts reach, or in tool calls, whose form leaves little room. A reply counts as a tool call if the
renderer read a call in it (`Message.tool_calls`), or if the env read it as a command, a query or a call of its own form
(`EnvStep.is_action`). All its tokens count, because it is not known which of them spell the call. Every other reply
counts as text.

`behaviour_metrics` splits entropy by the fifth of the attempt, which compares attempts of 5 and of 200 turns, and by
the kind of token: the first token of a reply usually decides what is done, the last one ends the turn, and a summary is
written for the memory (`memory.summary_tokens`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean

from turnwise.memory.dialogue import is_request
from turnwise.trajectory import Trajectory, TrajectoryGroup, Turn

ENTROPY = "rollout/entropy_"
"""Prefix of the names of these metrics."""
WHOLE = f"{ENTROPY}estimate"
NUM_TURNS = 8
"""Turns that have their own metric; later turns share one."""
MIN_TOKENS = 32
"""Tokens that a turn or a kind of reply needs; an estimate from fewer is mostly chance."""
PREFIX = "behaviour/"
NUM_PARTS = 5
TOOL_ERROR = "error:"
"""How a tool's answer begins when the call was wrong (`envs.tools`)."""


def behaviour_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Metric name to value; what was not seen, such as a tool's answer, has no metric."""
    attempts = [trajectory for group in groups for trajectory in group.trajectories if trajectory.turns]
    if not attempts:
        return {}
    values = _entropies(attempts) | _actions(groups, attempts)
    answers = [m for one in attempts for turn in one.turns for m in turn.observation if m.role == "tool"]
    if answers:
        values["tool_error_share"] = fmean(answer.content.startswith(TOOL_ERROR) for answer in answers)
    values["sampled_tokens_per_attempt"] = fmean(sum(len(t.sampled_ids) for t in one.turns) for one in attempts)
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def _entropies(attempts: Sequence[Trajectory]) -> dict[str, float]:
    logprobs: defaultdict[str, list[float]] = defaultdict(list)
    for attempt in attempts:
        for index, (turn, is_summary) in enumerate(_turns(attempt)):
            part = index * NUM_PARTS // len(attempt.turns) + 1
            logprobs[f"entropy_fifth_{part}"] += turn.sampler_logprobs
            if is_summary:
                logprobs["entropy_summary"] += turn.sampler_logprobs
            elif turn.sampler_logprobs:
                logprobs["entropy_first_token"].append(turn.sampler_logprobs[0])
                logprobs["entropy_last_token"].append(turn.sampler_logprobs[-1])
                logprobs["entropy_inner_token"] += turn.sampler_logprobs[1:-1]
    return {name: -fmean(own) for name, own in logprobs.items() if len(own) >= MIN_TOKENS}


def _actions(groups: Sequence[TrajectoryGroup], attempts: Sequence[Trajectory]) -> dict[str, float]:
    said = [[_words(turn) for turn, is_summary in _turns(one) if not is_summary] for one in attempts]
    everything = Counter(words for own in said for words in own)
    total = everything.total()
    values = {"unparsable_share": fmean(turn.is_unparsable for one in attempts for turn in one.turns)}
    if total:
        values["action_entropy"] = -sum(n / total * math.log(n / total) for n in everything.values())
    again = [words == before for own in said for before, words in pairwise(own)]
    if again:
        values["repeat_share"] = fmean(again)
    places = [place for group in groups for place in _places(group)]
    if places:
        values["sibling_diversity"] = fmean((len(set(place)) - 1) / (len(place) - 1) for place in places)
    return values


def _places(group: TrajectoryGroup) -> Iterator[list[str]]:
    """What the attempts of a group said in the same turn; turns that fewer than two of them reached are left out."""
    longest = max((len(one.turns) for one in group.trajectories), default=0)
    for index in range(longest):
        replies = [_words(one.turns[index]) for one in group.trajectories if index < len(one.turns)]
        if len(replies) > 1:
            yield replies


def _turns(attempt: Trajectory) -> Iterator[tuple[Turn, bool]]:
    """Every turn, and whether it is a summary."""
    before = attempt.start
    for turn in attempt.turns:
        yield turn, bool(before) and is_request(before[-1])
        before = turn.observation


def _words(turn: Turn) -> str:
    return " ".join(turn.reply.content.split()).lower()


def entropy_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Metric name to nats per token; turns and kinds of replies that were not sampled are left out."""
    logprobs: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for number, turn in _sampled_turns(group.trajectories):
            place = f"turn_{number}" if number <= NUM_TURNS else "turn_later"
            for name in ("estimate", place, "tool_call" if turn.is_action or turn.reply.tool_calls else "text"):
                logprobs[f"{ENTROPY}{name}"] += turn.sampler_logprobs
    return {
        name: -sum(values) / len(values)
        for name, values in logprobs.items()
        if name == WHOLE or len(values) >= MIN_TOKENS
    }


def entropy_place(name: str) -> str:
    """The turn or kind of reply of a metric, for a sentence: ` of turn 3`, ` of tool calls`; empty for the whole."""
    kind, _, number = name.removeprefix(ENTROPY).partition("_")
    if kind == "turn":
        return f" of turn {number}" if number.isdigit() else f" of turns after {NUM_TURNS}"
    return {"tool": " of tool calls", "text": " of text"}.get(kind, "")


def _sampled_turns(trajectories: Sequence[Trajectory]) -> Iterator[tuple[int, Turn]]:
    """(number from 1, turn) of every sampled turn; turns that the attempts of a group share come once."""
    for index, trajectory in enumerate(trajectories):
        first = trajectory.branch.turn if index and trajectory.branch is not None else 0
        yield from enumerate(trajectory.turns[first:], start=first + 1)
