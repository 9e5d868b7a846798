"""How undecided the policy is: minus the mean logprob of what was sampled estimates the entropy per token.

One number for everything, one for each turn of an attempt, and one for each kind of reply. A policy that comes apart
often does so in one place first: in late turns, which few attempts reach, or in the calls of tools, whose form leaves
little room. A reply in which the renderer read a call (`Message.tool_calls`) counts with all its tokens as a tool call,
any other as text: which tokens of a reply spell the call is not known, and a world that reads calls of its own form out
of plain text has text only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from turnwise.trajectory import Trajectory, TrajectoryGroup, Turn

ENTROPY = "rollout/entropy_"
"""How the names of these metrics begin."""
WHOLE = f"{ENTROPY}estimate"
NUM_TURNS = 8
"""Turns that have a number of their own; those after are one."""
MIN_TOKENS = 32
"""Of a turn or a kind: an estimate from fewer says more about luck than about the policy."""


def entropy_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Nats per token, by name; what was not sampled is left out."""
    logprobs: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for number, turn in _sampled_turns(group.trajectories):
            place = f"turn_{number}" if number <= NUM_TURNS else "turn_later"
            for name in ("estimate", place, "tool_call" if turn.reply.tool_calls else "text"):
                logprobs[f"{ENTROPY}{name}"] += turn.sampler_logprobs
    return {
        name: -sum(values) / len(values)
        for name, values in logprobs.items()
        if name == WHOLE or len(values) >= MIN_TOKENS
    }


def entropy_place(name: str) -> str:
    """What an entropy is of, for a sentence: ` of turn 3`, ` of tool calls`; nothing for the whole."""
    kind, _, number = name.removeprefix(ENTROPY).partition("_")
    if kind == "turn":
        return f" of turn {number}" if number.isdigit() else f" of turns after {NUM_TURNS}"
    return {"tool": " of tool calls", "text": " of text"}.get(kind, "")


def _sampled_turns(trajectories: Sequence[Trajectory]) -> Iterator[tuple[int, Turn]]:
    """(number from 1, turn); what the attempts of a group share was sampled once."""
    for index, trajectory in enumerate(trajectories):
        first = trajectory.branch.turn if index and trajectory.branch is not None else 0
        yield from enumerate(trajectory.turns[first:], start=first + 1)
