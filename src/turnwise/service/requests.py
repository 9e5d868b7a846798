"""Training requests: what they say, and the bytes they came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire

RequestKind = Literal[
    "forward_backward.proto",
    "forward_backward.json",
    "forward.json",
    "optim_step",
    "load_weights",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "reverse_kl",
    "refused",
]

_BODIES: dict[str, type[BaseModel]] = {
    "forward_backward.json": schemas.ForwardBackwardBody,
    "forward.json": schemas.ForwardBody,
    "optim_step": schemas.OptimStepBody,
    "load_weights": schemas.LoadWeightsBody,
    "save_weights": schemas.SaveWeightsBody,
    "save_weights_for_sampler": schemas.SaveWeightsBody,
    "save_weights_external": schemas.SaveWeightsBody,
    "reverse_kl": schemas.ReverseKlBody,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """One request to one model."""

    kind: RequestKind
    model_id: str
    seq: int | None
    body: bytes
    parsed: Any
    """A `wire.ForwardBackwardRequest` or one of the schemas."""

    @property
    def changes_nothing(self) -> bool:
        """The adapter is the same afterwards."""
        is_forward = isinstance(self.parsed, wire.ForwardBackwardRequest) and self.parsed.forward_only
        return is_forward or self.kind.startswith("save_")


def parse_request(kind: RequestKind, body: bytes) -> TrainingRequest:
    """Read a body; what cannot be read is a `DataError` or pydantic's own error."""
    if kind == "forward_backward.proto":
        request = wire.decode_forward_backward(body)
        return TrainingRequest(kind=kind, model_id=request.model_id, seq=request.seq_id, body=body, parsed=request)
    parsed: Any = _BODIES[kind].model_validate_json(body)
    if kind in ("forward_backward.json", "forward.json"):
        is_forward = kind == "forward.json"
        batch = wire.read_forward_backward(parsed.forward_input if is_forward else parsed.forward_backward_input)
        request = wire.ForwardBackwardRequest(
            model_id=parsed.model_id, seq_id=parsed.seq_id, batch=batch, forward_only=is_forward
        )
        return TrainingRequest(kind=kind, model_id=request.model_id, seq=request.seq_id, body=body, parsed=request)
    return TrainingRequest(kind=kind, model_id=parsed.model_id or "", seq=parsed.seq_id, body=body, parsed=parsed)


def place_of(kind: RequestKind, body: bytes) -> tuple[str, int] | None:
    """The model and the number of a request that was refused, where they can be read at all."""
    if kind == "forward_backward.proto":
        return wire.read_place(body)
    try:
        place = schemas.PlaceBody.model_validate_json(body)
    except ValidationError:
        return None
    return place.model_id, place.seq_id
