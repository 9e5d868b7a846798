"""Trajectories as JSON, exact both ways: what a pool keeps over the end of a process."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from turnwise.errors import Party
from turnwise.trajectory import Branch, EndReason, Failure, Message, ToolCall, Trajectory, Turn


def pack_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Compressed JSON; Python writes floats so that they come back bit for bit."""
    return zlib.compress(json.dumps([asdict(one) for one in trajectories]).encode(), level=1)


def unpack_trajectories(data: bytes) -> tuple[Trajectory, ...]:
    return tuple(_trajectory(entry) for entry in json.loads(zlib.decompress(data)))


def _trajectory(entry: dict[str, Any]) -> Trajectory:
    failure, branch = entry.pop("failure"), entry.pop("branch")
    return Trajectory(
        start=_messages(entry.pop("start")),
        turns=tuple(_turn(turn) for turn in entry.pop("turns")),
        end_reason=EndReason(entry.pop("stop_reason", None) or entry.pop("end_reason")),  # older files: stop_reason
        failure=None if failure is None else Failure(party=Party(failure["party"]), detail=failure["detail"]),
        branch=None if branch is None else Branch(**branch),
        **entry,
    )


def _turn(entry: dict[str, Any]) -> Turn:
    ids = {name: tuple(entry.pop(name)) for name in ("prompt_ids", "sampled_ids", "sampler_logprobs")}
    (reply,) = _messages([entry.pop("reply")])
    return Turn(**ids, reply=reply, observation=_messages(entry.pop("observation")), **entry)


def _messages(entries: list[dict[str, Any]]) -> tuple[Message, ...]:
    return tuple(
        Message(tool_calls=tuple(ToolCall(**call) for call in entry.pop("tool_calls")), **entry) for entry in entries
    )
