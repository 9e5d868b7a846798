"""Results of requests: written as protobuf or JSON, and read back from the journal."""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.service.wire import proto as pb
from turnwise.service.wire.types import JsonObject
from turnwise.types import ForwardBackwardOutput, SampleResponse, TensorData

Category = Literal["user", "server", "unknown"]
"""Who caused an error; SDKs try again if it was the server."""

MISSING_TOPK_LOGPROB = -99999.0
"""Fills the cells of a top-k table that has no entry."""

_PROTO_OUTPUT = pb.message_class("ForwardBackwardOutput")
_PROTO_SAMPLE = pb.message_class("SampleResponse")


class RequestOutcome(ABC):
    """The outcome of a request, and its forms for the client and for the journal."""

    num_sampled_tokens: int = 0
    num_trained_tokens: float = 0.0

    @property
    def failure(self) -> RequestFailure | None:
        """The failure; None if the request succeeded."""
        return None

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        return 500

    @abstractmethod
    def to_json(self) -> JsonObject: ...

    def to_proto(self) -> bytes | None:
        """Return the protobuf form; None where the wire has none."""
        return None

    def to_journal(self) -> bytes:
        """Return the bytes that `outcome_from_journal` reads; samples are never journaled."""
        return b"J" + json.dumps(self.to_json()).encode()


@dataclass(frozen=True, slots=True)
class JsonReply(RequestOutcome):
    """A plain answer."""

    content: JsonObject

    def to_json(self) -> JsonObject:
        return self.content


@dataclass(frozen=True, slots=True)
class RequestFailure(RequestOutcome):
    """The error of a request that was accepted and went wrong, as the SDKs read it."""

    error: str
    category: Category
    is_final: bool = True
    """False if the same request may still run after a restart."""

    @property
    def failure(self) -> RequestFailure:
        return self

    def to_json(self) -> JsonObject:
        return {"error": self.error, "category": self.category}

    def to_journal(self) -> bytes:
        return b"E" + json.dumps([self.error, self.category]).encode()


@dataclass(frozen=True, slots=True)
class TrainingReply(RequestOutcome):
    """What `forward` and `forward_backward` return."""

    output: ForwardBackwardOutput

    @property
    def num_trained_tokens(self) -> float:
        return max(self.output.metrics.get("num_trained_tokens:sum", 0.0), 0.0)

    @property
    def num_bytes(self) -> int:
        return 500 + sum(4 * len(tensor) + 200 for entry in self.output.loss_fn_outputs for tensor in entry.values())

    def to_json(self) -> JsonObject:
        return output_to_json(self.output)

    def to_proto(self) -> bytes:
        return output_to_proto(self.output)

    def to_journal(self) -> bytes:
        return b"P" + output_to_proto(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReply(RequestOutcome):
    """A sample response, and what of the wire's extras was asked for."""

    response: SampleResponse
    topk_sampled: Sequence[Sequence[Sequence[tuple[int, float]]]] | None = None
    """[sample][position][k]"""
    target_logprobs: TensorData | None = None

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.response.sequences)

    @property
    def num_bytes(self) -> int:
        prompt = len(self.response.prompt_logprobs or ())
        topk = sum(len(row or ()) for row in self.response.topk_prompt_logprobs or ())
        alternatives = self.response.prompt_alt_tokens
        drawn = 0 if alternatives is None else 12 * len(alternatives.tokens)
        return 500 + 72 * (self.num_sampled_tokens + prompt + topk) + drawn

    def to_json(self) -> JsonObject:
        return sample_to_json(self)

    def to_proto(self) -> bytes:
        return sample_to_proto(self)


def outcome_from_journal(data: bytes) -> RequestOutcome:
    """Read what `RequestOutcome.to_journal` wrote."""
    match data[:1]:
        case b"E":
            return RequestFailure(*json.loads(data[1:]))
        case b"P":
            return TrainingReply(output_from_proto(data[1:]))
        case _:
            return JsonReply(json.loads(data[1:]))


def output_to_proto(output: ForwardBackwardOutput) -> bytes:
    message = _PROTO_OUTPUT(loss_fn_output_type=output.loss_fn_output_type)
    for key, value in output.metrics.items():
        message.metrics[key] = value
    arrays = [
        {key: tensor.to_numpy().astype("<f4") for key, tensor in entry.items()} for entry in output.loss_fn_outputs
    ]
    for kind, group in itertools.groupby(arrays, key=_record_kind):  # a record is rectangular after its first axis
        members = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(members))
        for key, trailing in kind:
            parts = [member[key].tobytes() for member in members]
            tensor = record.fields[key]
            tensor.data = b"".join(parts)
            tensor.offsets = np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes()
            tensor.dtype = pb.DTYPE_FLOAT32
            tensor.trailing_shape.extend(trailing)
    return message.SerializeToString()


def _record_kind(arrays: Mapping[str, NDArray[np.float32]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((key, array.shape[1:]) for key, array in sorted(arrays.items()))


def output_from_proto(data: bytes) -> ForwardBackwardOutput:
    """Read what `output_to_proto` wrote; the journal keeps finished results this way."""
    message = _PROTO_OUTPUT()
    message.ParseFromString(data)
    outputs: list[dict[str, TensorData]] = []
    for record in message.loss_fn_outputs:
        entries: list[dict[str, TensorData]] = [{} for _ in range(record.num_datums)]
        for key, tensor in record.fields.items():
            offsets = np.frombuffer(tensor.offsets, dtype="<i8")
            for entry, (start, stop) in zip(entries, itertools.pairwise(offsets), strict=True):
                array = np.frombuffer(tensor.data[int(start) : int(stop)], dtype="<f4")
                entry[key] = TensorData.from_numpy(array.reshape(-1, *tensor.trailing_shape))
        outputs += entries
    return ForwardBackwardOutput(message.loss_fn_output_type, outputs, dict(message.metrics))


def output_to_json(output: ForwardBackwardOutput) -> JsonObject:
    outputs = [{key: tensor_to_json(tensor) for key, tensor in entry.items()} for entry in output.loss_fn_outputs]
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(output.metrics),
    }


def tensor_to_json(tensor: TensorData) -> JsonObject:
    array = tensor.to_numpy()
    return {"data": array.ravel().tolist(), "dtype": tensor.dtype, "shape": list(array.shape)}


def sample_to_proto(reply: SampleReply) -> bytes:
    response, message = reply.response, _PROTO_SAMPLE()
    for index, sequence in enumerate(response.sequences):
        row = message.sequences.add()
        row.stop_reason = pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH
        row.tokens = np.asarray(sequence.tokens, dtype="<i4").tobytes()
        row.logprobs = np.asarray(sequence.logprobs or [], dtype="<f4").tobytes()
        if reply.topk_sampled is not None:
            _fill_topk(row.topk_sampled_logprobs, reply.topk_sampled[index])
    if response.prompt_logprobs is not None:
        numbers = [math.nan if value is None else value for value in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(numbers, dtype="<f4").tobytes()
    if response.topk_prompt_logprobs is not None:
        _fill_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs)
    message.prompt_cache_hit_tokens = response.num_cached_prompt_tokens
    if reply.target_logprobs is not None:
        _fill_tensor(message.target_prompt_logprobs, reply.target_logprobs)
    if response.prompt_alt_tokens is not None:
        _fill_tensor(message.prompt_alt_tokens.tokens, response.prompt_alt_tokens.tokens)
        _fill_tensor(message.prompt_alt_tokens.logprobs, response.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def _fill_tensor(message: Any, tensor: TensorData) -> None:
    """Dense; ids travel as int32, as the SDK's wire format says."""
    is_ids = tensor.dtype == "int64"
    message.dtype = pb.DTYPE_INT32 if is_ids else pb.DTYPE_FLOAT32
    array = tensor.to_numpy()
    message.shape.extend(array.shape)
    message.dense = array.astype("<i4" if is_ids else "<f4").tobytes()


def _fill_topk(message: Any, rows: Sequence[Sequence[tuple[int, float]] | None]) -> None:
    width = max((len(row) for row in rows if row is not None), default=0)
    ids = np.zeros((len(rows), width), dtype="<i4")
    logprobs = np.full((len(rows), width), MISSING_TOPK_LOGPROB, dtype="<f4")
    for index, row in enumerate(rows):
        for k, (token, logprob) in enumerate(row or ()):
            ids[index, k], logprobs[index, k] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = width, len(rows)


def sample_to_json(reply: SampleReply) -> JsonObject:
    response = reply.response
    body: JsonObject = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": [int(token) for token in sequence.tokens],
                "logprobs": list(sequence.logprobs or []),
            }
            for sequence in response.sequences
        ],
    }
    if response.prompt_logprobs is not None:
        body["prompt_logprobs"] = list(response.prompt_logprobs)
    if response.topk_prompt_logprobs is not None:
        body["topk_prompt_logprobs"] = [
            None if row is None else [list(pair) for pair in row] for row in response.topk_prompt_logprobs
        ]
    if reply.target_logprobs is not None:
        body["target_prompt_logprobs"] = tensor_to_json(reply.target_logprobs)
    if response.prompt_alt_tokens is not None:
        alternatives = response.prompt_alt_tokens
        body["prompt_alt_tokens"] = {
            "tokens": tensor_to_json(alternatives.tokens),
            "logprobs": tensor_to_json(alternatives.logprobs),
        }
    return body
