"""Every kind of training request: how its body is read, and the operation that it queues."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.client.checkpoints import Kind, verify
from turnwise.engine.worker import Steps, in_one_step
from turnwise.errors import DataError
from turnwise.service.engines import ServedModel
from turnwise.service.failures import HttpFailure
from turnwise.service.futures import Promise
from turnwise.service.store.store import OwnedCheckpointRow, RunRow, Store
from turnwise.service.training.checkpoints import OwnedCheckpoints
from turnwise.service.training.parked_adapters import ParkedAdapter, ParkedPolicy
from turnwise.service.training.queue import Lane, Operation
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire
from turnwise.service.wire.results import JsonReply, TrainingReply, tensor_to_json
from turnwise.types import Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.service.sampling.sampling import Sampling

KINDS_SAVED: dict[str, Kind] = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
REVERSE_KL_LOSS = ("importance_sampling", {"kl_coef": 1.0, "kl_estimator": "k2"})
"""With advantages of 0 only the KL term is left: weight * (student - reference)^2 / 2 at each target."""


@dataclass(slots=True, eq=False)
class TrainingModel:
    """An open training client and its adapter."""

    run: RunRow
    served: ServedModel
    adapter: ParkedAdapter
    lane: Lane
    steps_since_snapshot: int = 0
    is_saving: bool = False


class OperationBuilder:
    """Turns parsed requests into operations."""

    def __init__(
        self,
        store: Store,
        checkpoints: OwnedCheckpoints,
        sampling: Sampling,
        *,
        after_step: Callable[[TrainingModel], None],
        after_load: Callable[[TrainingModel], None],
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._sampling = sampling
        self._after_step = after_step
        self._after_load = after_load

    def build(
        self, model: TrainingModel, request: TrainingRequest, promise: Promise | None, request_id: str
    ) -> Operation:
        """Turn a request into an operation for the engine; refuse a request that cannot work."""
        operation = REQUESTS[request.kind].build(self, model, request, request_id)
        operation.promise = promise
        return operation

    def forward_backward(self, model: TrainingModel, request: TrainingRequest, _: str) -> Operation:
        asked: wire.ForwardBackwardRequest = request.parsed
        batch = self._with_reference(model, asked.batch)

        def begin(engine: Engine) -> Steps:
            run = engine.forward if asked.forward_only else engine.forward_backward
            return (yield from run(model.adapter.load(engine), batch.datums, batch.loss_fn, batch.loss_fn_config))

        def finish(output: ForwardBackwardOutput) -> TrainingReply:
            return TrainingReply(wire.join_columns(output, batch.widths))

        return Operation(
            begin=begin,
            finish=finish,
            batch=None if asked.forward_only or model.run.is_critic else batch,
            adapter=model.adapter.load,
            cost=batch.num_tokens,
        )

    def _with_reference(self, model: TrainingModel, batch: wire.TrainingBatch) -> wire.TrainingBatch:
        """Replace a checkpoint path in `kl_reference` by its directory; clients cannot name any other directory."""
        reference = batch.loss_fn_config.get("kl_reference", "base")
        if reference == "base":
            return batch
        row = self._checkpoints.find(str(reference), model.run.owner)
        config = {**batch.loss_fn_config, "kl_reference": str(self._checkpoints.directory(row))}
        return replace(batch, loss_fn_config=config)

    def optim_step(self, model: TrainingModel, request: TrainingRequest, _: str) -> Operation:
        params = wire.read_adam(request.parsed)

        def finish(metrics: dict[str, float]) -> JsonReply:
            model.run.num_steps = int(metrics["optimizer_step"])
            model.steps_since_snapshot += 1
            self._after_step(model)
            return JsonReply({"type": "optim_step", "metrics": metrics})

        return Operation(
            begin=in_one_step(lambda engine: engine.optim_step(model.adapter.load(engine), params)),
            finish=finish,
        )

    def load(self, model: TrainingModel, request: TrainingRequest, _: str) -> Operation:
        body: schemas.LoadWeightsBody = request.parsed
        found: list[Path] = []

        def prepare() -> None:
            row = self._checkpoints.find(body.path, model.run.owner)
            if row.base_model not in (model.run.base_model, model.served.name, str(model.served.directory)):
                raise HttpFailure(400, f"{row.path} belongs to the base model {row.base_model}")
            if body.optimizer and not row.has_optimizer:
                raise HttpFailure(400, f"{row.path} has no optimizer state; load it without, or save with save_state")
            found.append(self._checkpoints.directory(row))

        def load(engine: Engine) -> None:
            verify(found[0])
            engine.load_adapter(model.adapter.load(engine), found[0], with_optimizer=body.optimizer)

        def finish(_: None) -> JsonReply:
            self._after_load(model)
            return JsonReply({"type": "load_weights", "path": body.path, "model_id": model.run.model_id})

        return Operation(begin=in_one_step(load), prepare=prepare, finish=finish, needs_quiet=True)

    def save(self, model: TrainingModel, request: TrainingRequest, request_id: str) -> Operation:
        body: schemas.SaveWeightsBody = request.parsed
        kind = KINDS_SAVED[request.kind]
        if kind == "sampler_weights":
            _refuse_critic(model)
            if body.path is None:
                return self._publish(model, body)
        if body.path is None:
            raise HttpFailure(400, "path is missing; send the name of the checkpoint")
        now = time.time()
        row = OwnedCheckpointRow(
            model_id=model.run.model_id,
            kind=kind,
            name=body.path,
            owner=model.run.owner,
            request_id=request_id,
            base_model=model.run.base_model,
            lora=model.run.lora,
            has_optimizer=kind == "weights",
            created_at=now,
            expires_at=None if body.ttl_seconds is None else now + body.ttl_seconds,
            size_bytes=0,
            user_metadata={**model.run.user_metadata, **(body.user_metadata or {})},
        )

        def save(engine: Engine) -> OwnedCheckpointRow:
            def fill(directory: Path) -> None:
                engine.save_adapter(model.adapter.load(engine), directory, with_optimizer=row.has_optimizer)

            return self._checkpoints.write(row, str(model.served.directory), fill)

        def finish(written: OwnedCheckpointRow) -> JsonReply:
            self._store.put(written)
            size = {"size_bytes": written.size_bytes} if kind == "external_weights" else {}
            return JsonReply({"type": request.kind, "path": written.path, **size})

        return Operation(
            begin=in_one_step(save),
            prepare=lambda: self._checkpoints.check_name(row, overwrite=body.overwrite),
            finish=finish,
            needs_quiet=True,
        )

    def _publish(self, model: TrainingModel, body: schemas.SaveWeightsBody) -> Operation:
        """Publish weights without a name, only for sampling."""
        if body.sampling_session_seq_id is None:
            raise HttpFailure(400, "send path (a name to save under) or sampling_session_seq_id (to sample only)")
        row = self._sampling.published_row(model.run, body.sampling_session_seq_id)

        def publish(engine: Engine) -> ParkedPolicy:
            weights = ParkedPolicy(None, policy=engine.publish(model.adapter.load(engine)))
            directory = self._sampling.directory_of(row)
            if directory is not None:
                weights.write(engine, directory)
            return weights

        def finish(weights: ParkedPolicy) -> JsonReply:
            self._sampling.add(row, model.served, weights)
            published = {"type": "save_weights_for_sampler", "sampling_session_id": row.sampler_id, "path": None}
            return JsonReply(published)

        return Operation(begin=in_one_step(publish), finish=finish)

    def reverse_kl(self, model: TrainingModel, request: TrainingRequest, _: str) -> Operation:
        """Train on the reverse KL at sampled tokens: docs/service.md defines it."""
        body: schemas.ReverseKlBody = request.parsed
        _refuse_critic(model)
        if not body.temperature > 0:
            raise HttpFailure(400, f"temperature={body.temperature}; expected more than 0")
        reference = self._sampling.reference_weights(body.reference_model_path, model.run.owner, model.served)
        pairs = [_reverse_kl_datums(index, datum, body.temperature) for index, datum in enumerate(body.data)]
        student, teacher = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

        def begin(engine: Engine) -> Generator[None, None, tuple[list[Datum], list[Any], ForwardBackwardOutput]]:
            policy = reference.load(engine)
            known = yield from engine.score(policy, teacher)
            reference_logprobs = [entry["logprobs"].to_numpy() for entry in known.loss_fn_outputs]
            datums = [
                _with_input(datum, "ref_logprobs", logprobs)
                for datum, logprobs in zip(student, reference_logprobs, strict=True)
            ]
            loss_fn, config = REVERSE_KL_LOSS
            adapter = model.adapter.load(engine)
            output = yield from engine.forward_backward(adapter, datums, loss_fn, config)
            return datums, reference_logprobs, output

        return Operation(
            begin=begin,
            finish=lambda value: _reverse_kl_result(*value),
            cost=2 * sum(datum.model_input.length for datum in student),
        )


@dataclass(frozen=True, slots=True)
class RequestType:
    """One kind of training request: how its body is read, and what it does."""

    read: Callable[[bytes], Any]
    """Gives a value with `model_id` and `seq_id`; what cannot be read is a `DataError` or pydantic's own error."""
    build: Callable[[OperationBuilder, TrainingModel, TrainingRequest, str], Operation]
    changes_nothing: bool = False
    """The adapter is the same afterwards: after a restart it need not run again."""
    is_protobuf: bool = False


_SAVE = RequestType(schemas.SaveWeightsBody.model_validate_json, OperationBuilder.save, changes_nothing=True)

REQUESTS: Mapping[str, RequestType] = {
    "forward_backward.proto": RequestType(
        wire.decode_forward_backward, OperationBuilder.forward_backward, is_protobuf=True
    ),
    "forward_backward.json": RequestType(wire.read_forward_backward, OperationBuilder.forward_backward),
    "forward.json": RequestType(wire.read_forward, OperationBuilder.forward_backward, changes_nothing=True),
    "optim_step": RequestType(schemas.OptimStepBody.model_validate_json, OperationBuilder.optim_step),
    "load_weights": RequestType(schemas.LoadWeightsBody.model_validate_json, OperationBuilder.load),
    "save_weights": _SAVE,
    "save_weights_for_sampler": _SAVE,
    "save_weights_external": _SAVE,
    "reverse_kl": RequestType(schemas.ReverseKlBody.model_validate_json, OperationBuilder.reverse_kl),
}
"""Every training request by its name, which the journal stores too: a new one is a line here, its method above, its
body in `wire/schemas.py` and its route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """One request to one model: its parsed content and its bytes."""

    kind: str
    """A name of `REQUESTS`, or `refused` for one that only uses up its number."""
    model_id: str
    seq: int | None
    body: bytes
    parsed: Any
    """A `wire.ForwardBackwardRequest` or one of the schemas."""

    @property
    def changes_nothing(self) -> bool:
        return REQUESTS[self.kind].changes_nothing or getattr(self.parsed, "forward_only", False)


def parse_request(kind: str, body: bytes) -> TrainingRequest:
    """Read a body; `RequestType.read` says what it raises."""
    parsed = REQUESTS[kind].read(body)
    return TrainingRequest(kind=kind, model_id=parsed.model_id or "", seq=parsed.seq_id, body=body, parsed=parsed)


def sender_of(kind: str, body: bytes) -> tuple[str, int] | None:
    """Read the model and the number of a request that was refused, where they can be read at all."""
    return wire.read_proto_sender(body) if REQUESTS[kind].is_protobuf else wire.read_json_sender(body)


def _reverse_kl_datums(index: int, body: schemas.ReverseKlDatumBody, temperature: float) -> tuple[Datum, Datum]:
    """Make the datum that the student trains on and the one that the reference scores: same targets, own inputs."""
    targets = wire.read_tensor("target_tokens", body.target_tokens.model_copy(update={"dtype": "int64"})).to_numpy()
    weights = wire.read_tensor("weights", body.weights).to_numpy().astype(np.float32)
    if targets.ndim != 1 or weights.shape != targets.shape:
        raise DataError(
            f"datum {index}: target_tokens has shape {list(targets.shape)}, weights {list(weights.shape)}; "
            "expected one weight per target"
        )
    shared = {"target_tokens": targets, "temperature": np.full(len(targets), temperature, dtype=np.float32)}
    zeros, ones = np.zeros(len(targets), dtype=np.float32), np.ones(len(targets), dtype=np.float32)
    student = {**shared, "weights": weights, "mask": ones, "logprobs": zeros, "advantages": zeros}
    teacher = {**shared, "weights": ones, "mask": ones}
    return (
        Datum(model_input=wire.read_model_input(body.student_input, index), loss_fn_inputs=student),
        Datum(model_input=wire.read_model_input(body.reference_input, index), loss_fn_inputs=teacher),
    )


def _with_input(datum: Datum, key: str, array: np.ndarray) -> Datum:
    inputs = {**datum.loss_fn_inputs, key: TensorData.from_numpy(array)}
    return Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def _reverse_kl_result(datums: list[Datum], reference: list[Any], output: ForwardBackwardOutput) -> JsonReply:
    outputs: list[wire.JsonObject] = []
    gaps: list[np.ndarray] = []
    for datum, other, entry in zip(datums, reference, output.loss_fn_outputs, strict=True):
        gap = entry["logprobs"].to_numpy() - other
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        outputs.append({"loss": tensor_to_json(TensorData.from_numpy(weights * gap**2 / 2))})
        gaps.append(gap[weights != 0])
    every = np.concatenate(gaps)
    metrics = {
        "loss:sum": float(sum(sum(entry["loss"]["data"]) for entry in outputs)),
        "reverse_kl_k1:mean": float(every.mean()) if len(every) else 0.0,
        "num_trained_tokens:sum": float(len(every)),
    }
    return JsonReply({"type": "mint_forward_backward_reverse_kl", "outputs": outputs, "metrics": metrics})


def _refuse_critic(model: TrainingModel) -> None:
    if model.run.is_critic:
        raise HttpFailure(400, "this client trains a critic, which has values and no tokens to sample")
