"""The policy's entropy per token, estimated by minus the mean logprob of sampled tokens.

There is one number for all replies, one for each turn of an attempt, and one for each kind of reply. A policy that
collapses often does so in one place first: in late turns, which few attempts reach, or in tool calls, whose form leaves
little room. A reply counts as a tool call if the renderer read a call in it (`Message.tool_calls`), or if the env read
it as a command, a query or a call of its own form (`EnvStep.is_action`). All its tokens count, because it is not known
which of them spell the call. Every other reply counts as text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from turnwise.trajectory import Trajectory, TrajectoryGroup, Turn

ENTROPY = "rollout/entropy_"
"""Prefix of the names of these metrics."""
WHOLE = f"{ENTROPY}estimate"
NUM_TURNS = 8
"""Turns that have their own metric; later turns share one."""
MIN_TOKENS = 32
"""Tokens that a turn or a kind of reply needs; an estimate from fewer is mostly chance."""


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
