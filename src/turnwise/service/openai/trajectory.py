"""A trajectory as JSON and back, number by number: what `GET /v1/captures/ID` holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from turnwise.errors import DataError
from turnwise.trajectory import EndReason, Message, ToolCall, Trajectory, Turn


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Ids and logprobs as plain lists; fields keep their names."""
    found = asdict(trajectory)
    for name in ("failure", "branch"):
        if found.pop(name) is not None:
            raise DataError(f"a captured trajectory with a {name}; nobody but the policy takes part in it")
    return found


def trajectory_from_json(values: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `GET /v1/captures/ID` answered with, as `trajectory_to_datums` takes it."""
    try:
        fields = dict(values)
        start = tuple(_message(one) for one in fields.pop("start"))
        turns = tuple(_turn(one) for one in fields.pop("turns"))
        end_reason = EndReason(fields.pop("stop_reason", None) or fields.pop("end_reason"))
        return Trajectory(start=start, turns=turns, end_reason=end_reason, **fields)
    except (KeyError, TypeError, ValueError) as cause:
        raise DataError(f"this is no trajectory as /v1/captures gives it: {cause!r}") from cause


def _turn(values: Mapping[str, Any]) -> Turn:
    fields = dict(values)
    reply, observation = _message(fields.pop("reply")), tuple(_message(one) for one in fields.pop("observation"))
    for name in ("prompt_ids", "sampled_ids", "sampler_logprobs"):
        fields[name] = tuple(fields[name])
    return Turn(reply=reply, observation=observation, **fields)


def _message(values: Mapping[str, Any]) -> Message:
    fields = dict(values)
    calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls"))
    return Message(tool_calls=calls, **fields)
