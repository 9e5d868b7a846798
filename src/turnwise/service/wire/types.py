"""Translates JSON and protobuf bodies into our types. `results.py` translates results back.

Tinker's wire has no mask and lets every target be scored, so a datum without one gets a mask of ones here: logprobs
come back for every target, and weights or advantages of 0 train nothing. Targets of shape [N, K] become K datums over
the same input, which the engine runs as one tree, and their logprobs are put together again on the way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import ValidationError

from turnwise.errors import ConfigError, DataError
from turnwise.losses.table import LOSSES, is_imitation
from turnwise.service.wire import proto as pb
from turnwise.service.wire import schemas
from turnwise.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleRequest,
    SamplingParams,
    TensorData,
    TensorDtype,
)

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_DENSE = 1 << 26
"""Most numbers that one sparse tensor may stand for."""
MAX_DATUMS = 100_000
"""Most datums of one request: two bytes of protobuf become a datum of some hundred bytes here."""
MAX_WIDTH = 128
"""Most target columns, K, of one datum."""

REFUSED_LOSSES: Mapping[str, str] = {
    "stable_reinforce": (
        "the SDK does not define it: it has the name, a setting (kl_coeff) and a flag that makes the server record "
        "something while sampling, but says neither what is recorded nor what the loss is, so any stand-in would train "
        "something else under that name; use importance_sampling, ppo, cispo, dro or gspo (with kl_coef for a KL "
        "term), or a loss of your own with forward_backward_custom"
    ),
    "custom": (
        "losses that run on the server are not supported; forward_backward_custom runs yours on the client, be it a "
        "function or a handle from create_custom_loss"
    ),
}
"""Losses of the SDKs that this service does not have, and why."""

JsonObject = dict[str, Any]

_DTYPES: dict[int, tuple[str, TensorDtype]] = {
    pb.DTYPE_FLOAT32: ("<f4", "float32"),
    pb.DTYPE_INT64: ("<i8", "int64"),
    pb.DTYPE_INT32: ("<i4", "int64"),
}
_PROTO_REQUEST = pb.message_class("ForwardBackwardRequest")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The datums of one forward or forward_backward, as the engine takes them."""

    datums: Sequence[Datum]
    widths: Sequence[int]
    """Per datum of the client: the number of `datums` made from it; 0 means a single one-dimensional datum."""
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]

    @property
    def num_tokens(self) -> int:
        return sum(datum.model_input.length for datum in self.datums)

    @property
    def loss_key(self) -> tuple[str, tuple[tuple[str, float | str], ...]]:
        """Batches with the same key may be trained in shared passes."""
        return self.loss_fn, tuple(sorted(self.loss_fn_config.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardRequest:
    model_id: str
    seq_id: int | None
    batch: TrainingBatch
    forward_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSample:
    """A sample request, and the extras that only the wire has."""

    sample: SampleRequest
    topk_sample_logprobs: int = 0
    last_n: int | None = None
    """Return scores of this many tokens at the prompt's end; None returns all."""
    targets: NDArray[np.int64] | None = field(default=None, compare=False)
    """[prompt - 1, K] ids to score; -1 asks for nothing."""


def decode_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Read a protobuf `ForwardBackwardRequest`."""
    message = _PROTO_REQUEST()
    try:
        message.ParseFromString(body)
    except DecodeError as cause:
        raise DataError("the body is no ForwardBackwardRequest in protobuf") from cause
    if message.loss_fn_config_v2:
        config = {
            key: value.text if value.HasField("text") else value.number
            for key, value in message.loss_fn_config_v2.items()
        }
    else:
        config = dict(message.loss_fn_config)
    datums = (_proto_datum(index, datum) for index, datum in enumerate(message.data))
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id or None,
        batch=make_batch(datums, message.loss_fn, config),
        forward_only=message.forward_only,
    )


def read_proto_sender(body: bytes) -> tuple[str, int] | None:
    """Read the model and sequence number of a protobuf request, even when its datums cannot be used."""
    message = _PROTO_REQUEST()
    try:
        message.ParseFromString(body)
    except DecodeError:
        return None
    return (message.model_id, message.seq_id) if message.seq_id > 0 else None


def read_json_sender(body: bytes) -> tuple[str, int] | None:
    """Read the model and sequence number of a JSON request, whatever else is wrong with it."""
    try:
        sender = schemas.SenderBody.model_validate_json(body)
    except ValidationError:
        return None
    return sender.model_id, sender.seq_id


def make_batch(datums: Iterable[Datum], loss_fn: str, config: Mapping[str, float | str] | None) -> TrainingBatch:
    """Add the columns that Tinker leaves out, and split [N, K] targets into K datums."""
    if loss_fn in REFUSED_LOSSES:
        raise ConfigError(f"loss {loss_fn!r} is refused: {REFUSED_LOSSES[loss_fn]}")
    flat: list[Datum] = []
    widths: list[int] = []
    for index, datum in enumerate(datums):
        if index >= MAX_DATUMS:
            raise DataError(f"data holds more than {MAX_DATUMS:,} datums; send them in several requests")
        if not datum.model_input.length:
            raise DataError(f"datum {index}: model_input is empty; expected at least one token")
        columns = _split_columns(index, datum)
        widths.append(0 if columns is None else len(columns))
        flat += [_with_mask(column, loss_fn) for column in (columns or [datum])]
    if not flat:
        raise DataError("data is empty; expected at least one datum")
    return TrainingBatch(
        datums=flat,
        widths=widths,
        loss_fn=loss_fn,
        loss_fn_config={**(LOSSES[loss_fn].tinker_defaults if loss_fn in LOSSES else {}), **(config or {})},
    )


def _with_mask(datum: Datum, loss_fn: str) -> Datum:
    inputs = datum.loss_fn_inputs
    # The inputs of losses that Tinker does not have stay unchanged.
    is_of_tinker = loss_fn in LOSSES and LOSSES[loss_fn].is_of_tinker
    if not is_of_tinker or "target_tokens" not in inputs or "mask" in inputs:
        return datum
    ones = TensorData.from_numpy(np.ones(len(inputs["target_tokens"]), dtype=np.float32))
    added = {"mask": ones}
    if is_imitation(loss_fn) and "weights" not in inputs:
        added["weights"] = ones
    return Datum(model_input=datum.model_input, loss_fn_inputs={**inputs, **added})


def _split_columns(index: int, datum: Datum) -> list[Datum] | None:
    """One datum per target column of a two-dimensional datum; None for the usual one-dimensional one."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None or targets.shape is None or len(targets.shape) < 2:
        return None
    if len(targets.shape) > 2 or not 0 < targets.shape[1] <= MAX_WIDTH:
        raise DataError(
            f"datum {index}: target_tokens has shape {list(targets.shape)}; expected [N] or [N, K], K to {MAX_WIDTH}"
        )
    arrays = {key: tensor.to_numpy() for key, tensor in datum.loss_fn_inputs.items()}
    for key, array in arrays.items():
        if array.shape != tuple(targets.shape):
            raise DataError(f"datum {index}: {key} has shape {list(array.shape)}, target_tokens {list(targets.shape)}")
    return [
        Datum(
            model_input=datum.model_input,
            loss_fn_inputs={key: TensorData.from_numpy(array[:, k]) for key, array in arrays.items()},
        )
        for k in range(targets.shape[1])
    ]


def join_columns(output: ForwardBackwardOutput, widths: Sequence[int]) -> ForwardBackwardOutput:
    """One entry per datum of the client, with its logprobs in the shape of its target tokens.

    A critic's output (values and their mask, one per input position) stays unchanged.
    """
    if output.loss_fn_outputs and "values" in output.loss_fn_outputs[0]:
        return output
    outputs: list[dict[str, TensorData]] = []
    rest = iter(output.loss_fn_outputs)
    for width in widths:
        columns = [next(rest)["logprobs"].to_numpy() for _ in range(width or 1)]
        array = np.stack(columns, axis=1) if width else columns[0]
        outputs.append({"logprobs": TensorData.from_numpy(array.astype(np.float32))})
    return replace(output, loss_fn_outputs=outputs)


def _proto_datum(index: int, message: Any) -> Datum:
    chunks: list[EncodedTextChunk] = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise _text_only(index, str(chunk.WhichOneof("chunk")))
        chunks.append(EncodedTextChunk(tokens=_array(chunk.encoded_text.tokens, "<i4", "tokens").tolist()))
    inputs = {str(key): _proto_tensor(str(key), tensor) for key, tensor in message.loss_fn_inputs.items()}
    return Datum(model_input=ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def _text_only(index: int, kind: str) -> DataError:
    return DataError(f"datum {index}: model_input holds a chunk of kind {kind}; only text (token ids) is supported")


def _proto_tensor(key: str, message: Any) -> TensorData:
    if message.dtype not in _DTYPES:
        raise DataError(f"{key}: dtype {message.dtype} is not supported; expected float32, int64 or int32")
    numpy_dtype, dtype = _DTYPES[message.dtype]
    shape = list(message.shape) or None
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        values = _array(csr.values, numpy_dtype, key)
        return _dense(key, values, _array(csr.crow_indices, "<i8", key), _array(csr.col_indices, "<i8", key), shape)
    return TensorData.from_numpy(_reshaped(key, _array(message.dense, numpy_dtype, key).astype(dtype), shape))


def _array(data: bytes, dtype: str, what: str) -> NDArray[Any]:
    try:
        return np.frombuffer(data, dtype=dtype)
    except ValueError as cause:
        raise DataError(f"{what}: {len(data)} bytes are no whole number of {np.dtype(dtype).name} values") from cause


def _reshaped(key: str, array: NDArray[Any], shape: Sequence[int] | None) -> NDArray[Any]:
    if shape is None:
        return array
    if any(n < 0 for n in shape) or math.prod(shape) != array.size:
        raise DataError(f"{key}: {array.size} values do not fill the shape {list(shape)}")
    return array.reshape(tuple(shape))


def _dense(
    key: str, values: NDArray[Any], crow: NDArray[np.int64], col: NDArray[np.int64], shape: Sequence[int] | None
) -> TensorData:
    """Write a CSR tensor out; unlisted cells are 0."""
    if shape is None or len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MAX_DENSE:
        raise DataError(f"{key}: a sparse tensor needs a shape [N, K] of at most {MAX_DENSE} cells, and {shape} came")
    rows, width = int(shape[0]), int(shape[1])
    is_valid = (
        len(crow) == rows + 1
        and crow[0] == 0
        and crow[-1] == len(values) == len(col)
        and bool((np.diff(crow) >= 0).all())
        and (not len(col) or (col.min() >= 0 and col.max() < width))
    )
    if not is_valid:
        raise DataError(f"{key}: the sparse indices do not describe a tensor of shape {list(shape)}")
    dense = np.zeros((rows, width), dtype=np.int64 if values.dtype.kind == "i" else np.float32)
    dense[np.repeat(np.arange(rows), np.diff(crow)), col] = values
    return TensorData.from_numpy(dense)


def read_tensor(key: str, body: schemas.TensorBody) -> TensorData:
    numbers = body.data if isinstance(body.data, list) else [body.data]
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.asarray(numbers, dtype=np.float64)
            if body.dtype == "int64":
                if not (np.isfinite(values).all() and (np.abs(values) < 2**53).all()):
                    raise DataError(f"{key} holds numbers that are no int64")
                values = values.astype(np.int64)
            else:
                values = values.astype(np.float32)
    except (ValueError, OverflowError) as cause:
        raise DataError(f"{key} cannot be read as {body.dtype}") from cause
    if body.sparse_crow_indices is not None:
        crow = np.asarray(body.sparse_crow_indices, dtype=np.int64)
        return _dense(key, values, crow, np.asarray(body.sparse_col_indices or [], dtype=np.int64), body.shape)
    return TensorData.from_numpy(_reshaped(key, values, body.shape))


def read_model_input(body: schemas.ModelInputBody, index: int = 0) -> ModelInput:
    for chunk in body.chunks:
        if chunk.type != "encoded_text":
            raise _text_only(index, chunk.type)
    return ModelInput(chunks=[EncodedTextChunk(tokens=chunk.tokens) for chunk in body.chunks])


def read_forward_backward(content: bytes) -> ForwardBackwardRequest:
    """Read the JSON form of forward_backward."""
    body = schemas.ForwardBackwardBody.model_validate_json(content)
    batch = _read_batch(body.forward_backward_input)
    return ForwardBackwardRequest(model_id=body.model_id, seq_id=body.seq_id, batch=batch, forward_only=False)


def read_forward(content: bytes) -> ForwardBackwardRequest:
    """Read the JSON form of forward."""
    body = schemas.ForwardBody.model_validate_json(content)
    batch = _read_batch(body.forward_input)
    return ForwardBackwardRequest(model_id=body.model_id, seq_id=body.seq_id, batch=batch, forward_only=True)


def _read_batch(body: schemas.ForwardBackwardInputBody) -> TrainingBatch:
    datums = (
        Datum(
            model_input=read_model_input(datum.model_input, index),
            loss_fn_inputs={key: read_tensor(key, tensor) for key, tensor in datum.loss_fn_inputs.items()},
        )
        for index, datum in enumerate(body.data)
    )
    return make_batch(datums, body.loss_fn, body.loss_fn_config)


def read_lora(body: schemas.LoraBody) -> LoraConfig:
    return LoraConfig(**body.model_dump())


def read_adam(body: schemas.OptimStepBody) -> AdamParams:
    if body.optimizer_params is not None and body.optimizer_params.type not in ("adam", "adamw"):
        raise DataError(f"the optimizer {body.optimizer_params.type!r} is not supported; expected adamw")
    return AdamParams(**(body.adam_params or schemas.AdamBody()).model_dump())


def read_sample(body: schemas.SampleBody) -> ServedSample:
    prompt = read_model_input(body.prompt)
    params = body.sampling_params
    targets = None
    if body.target_prompt_logprobs is not None:
        targets = read_tensor("target_prompt_logprobs", _with_unasked(body.target_prompt_logprobs)).to_numpy()
        if targets.ndim != 2 or len(targets) != prompt.length - 1 or not 0 < targets.shape[1] <= MAX_WIDTH:
            raise DataError(
                f"target_prompt_logprobs has shape {list(targets.shape)}; expected [{prompt.length - 1}, K]"
            )
    sample = SampleRequest(
        prompt.to_ints(),
        SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=params.stop,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        ),
        num_samples=body.num_samples,
        include_prompt_logprobs=bool(body.prompt_logprobs) or body.topk_prompt_logprobs > 0,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        prompt_alt_tokens_k=body.prompt_alt_tokens_k,
    )
    return ServedSample(
        sample=sample,
        topk_sample_logprobs=body.topk_sample_logprobs,
        last_n=body.prompt_logprobs_last_n,
        targets=targets,
    )


def _with_unasked(body: schemas.TensorBody) -> schemas.TensorBody:
    """Write a sparse request out, with -1 where nothing is asked."""
    if body.sparse_crow_indices is None:
        return body
    numbers = body.data if isinstance(body.data, list) else [body.data]
    shifted = body.model_copy(update={"data": [n + 1 for n in numbers]})
    dense = read_tensor("target_prompt_logprobs", shifted)
    return schemas.TensorBody(data=[float(n) - 1 for n in dense.data], dtype="int64", shape=list(dense.shape or []))
