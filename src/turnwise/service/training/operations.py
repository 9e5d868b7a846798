"""What each training request does, as an operation for the queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.client.checkpoints import Kind, verify
from turnwise.errors import DataError
from turnwise.service.engines import ServedModel
from turnwise.service.failures import HttpFailure
from turnwise.service.futures import Promise
from turnwise.service.queue import Lane, Operation, Steps
from turnwise.service.requests import TrainingRequest
from turnwise.service.store.store import OwnedCheckpointRow, RunRow, Store
from turnwise.service.training.checkpoints import OwnedCheckpoints
from turnwise.service.training.parked_adapters import ParkedAdapter, ParkedPolicy
from turnwise.service.wire import results as wire_results
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire
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
    """A training client's adapter, alive."""

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
        match request.kind:
            case "forward_backward.proto" | "forward_backward.json" | "forward.json":
                return self._forward_backward(model, request.parsed, promise)
            case "optim_step":
                return self._optim_step(model, request.parsed, promise)
            case "load_weights":
                return self._load(model, request.parsed, promise)
            case "reverse_kl":
                return self._reverse_kl(model, request.parsed, promise)
            case "save_weights_for_sampler" if request.parsed.path is None:
                return self._publish(model, request.parsed, promise)
            case "save_weights" | "save_weights_for_sampler" | "save_weights_external":
                return self._save(model, request.parsed, KINDS_SAVED[request.kind], promise, request_id)
            case "refused":
                raise AssertionError("a refused request does nothing")

    def _forward_backward(
        self, model: TrainingModel, request: wire.ForwardBackwardRequest, promise: Promise | None
    ) -> Operation:
        batch = self._with_reference(model, request.batch)

        def begin(engine: Engine) -> Steps:
            run = engine.forward if request.forward_only else engine.forward_backward
            return (yield from run(model.adapter.load(engine), batch.datums, batch.loss_fn, batch.loss_fn_config))

        def finish(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
            return wire.join_columns(output, batch.widths)

        return Operation(
            promise=promise,
            begin=begin,
            finish=finish,
            batch=None if request.forward_only or model.run.is_critic else batch,
            adapter=model.adapter.load,
            cost=batch.num_tokens,
        )

    def _with_reference(self, model: TrainingModel, batch: wire.TrainingBatch) -> wire.TrainingBatch:
        """A checkpoint as `kl_reference` becomes its directory; no other directory may be named."""
        reference = batch.loss_fn_config.get("kl_reference", "base")
        if reference == "base":
            return batch
        row = self._checkpoints.find(str(reference), model.run.owner)
        config = {**batch.loss_fn_config, "kl_reference": str(self._checkpoints.directory(row))}
        return replace(batch, loss_fn_config=config)

    def _optim_step(self, model: TrainingModel, body: schemas.OptimStepBody, promise: Promise | None) -> Operation:
        params = wire.read_adam(body)

        def finish(metrics: dict[str, float]) -> wire.JsonObject:
            model.run.num_steps = int(metrics["optimizer_step"])
            model.steps_since_snapshot += 1
            self._after_step(model)
            return {"type": "optim_step", "metrics": metrics}

        return Operation(
            promise=promise,
            begin=_at_once(lambda engine: engine.optim_step(model.adapter.load(engine), params)),
            finish=finish,
        )

    def _load(self, model: TrainingModel, body: schemas.LoadWeightsBody, promise: Promise | None) -> Operation:
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

        def finish(_: None) -> wire.JsonObject:
            self._after_load(model)
            return {"type": "load_weights", "path": body.path, "model_id": model.run.model_id}

        return Operation(promise=promise, begin=_at_once(load), prepare=prepare, finish=finish, needs_quiet=True)

    def _save(
        self, model: TrainingModel, body: schemas.SaveWeightsBody, kind: Kind, promise: Promise | None, request_id: str
    ) -> Operation:
        if body.path is None:
            raise HttpFailure(400, "path is missing; send the name of the checkpoint")
        if kind == "sampler_weights":
            _refuse_critic(model)
        saved_by = next(name for name, saved in KINDS_SAVED.items() if saved == kind)
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

        def finish(written: OwnedCheckpointRow) -> wire.JsonObject:
            self._store.put(written)
            answer: wire.JsonObject = {"type": saved_by, "path": written.path}
            return {**answer, "size_bytes": written.size_bytes} if kind == "external_weights" else answer

        return Operation(
            promise=promise,
            begin=_at_once(save),
            prepare=lambda: self._checkpoints.check_name(row, overwrite=body.overwrite),
            finish=finish,
            needs_quiet=True,
        )

    def _publish(self, model: TrainingModel, body: schemas.SaveWeightsBody, promise: Promise | None) -> Operation:
        if body.sampling_session_seq_id is None:
            raise HttpFailure(400, "send path (a name to save under) or sampling_session_seq_id (to sample only)")
        _refuse_critic(model)
        row = self._sampling.published_row(model.run, body.sampling_session_seq_id)

        def publish(engine: Engine) -> ParkedPolicy:
            weights = ParkedPolicy(None, policy=engine.publish(model.adapter.load(engine)))
            directory = self._sampling.directory_of(row)
            if directory is not None:
                weights.write(engine, directory)
            return weights

        def finish(weights: ParkedPolicy) -> wire.JsonObject:
            self._sampling.add(row, model.served, weights)
            return {"type": "save_weights_for_sampler", "sampling_session_id": row.sampler_id, "path": None}

        return Operation(promise=promise, begin=_at_once(publish), finish=finish)

    def _reverse_kl(self, model: TrainingModel, body: schemas.ReverseKlBody, promise: Promise | None) -> Operation:
        """Reverse KL at sampled tokens: see docs/service.md for the definition."""
        _refuse_critic(model)
        if not body.temperature > 0:
            raise HttpFailure(400, f"temperature={body.temperature}; expected more than 0")
        reference = self._sampling.reference_weights(body.reference_model_path, model.run.owner, model.served)
        pairs = [_reverse_kl_datums(index, datum, body.temperature) for index, datum in enumerate(body.data)]
        student, teacher = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

        def begin(engine: Engine) -> Generator[None, None, tuple[list[Datum], list[Any], ForwardBackwardOutput]]:
            policy: Any = reference.load(engine)
            known = yield from engine.forward(policy, teacher, "cross_entropy", None)
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
            promise=promise,
            begin=begin,
            finish=lambda value: _reverse_kl_result(*value),
            cost=2 * sum(datum.model_input.length for datum in student),
        )


def _reverse_kl_datums(index: int, body: schemas.ReverseKlDatumBody, temperature: float) -> tuple[Datum, Datum]:
    """What the student trains on and what the reference scores: the same targets behind their own inputs."""
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


def _reverse_kl_result(datums: list[Datum], reference: list[Any], output: ForwardBackwardOutput) -> wire.JsonObject:
    outputs: list[wire.JsonObject] = []
    gaps: list[np.ndarray] = []
    for datum, other, entry in zip(datums, reference, output.loss_fn_outputs, strict=True):
        gap = entry["logprobs"].to_numpy() - other
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        outputs.append({"loss": wire_results.tensor_to_json(TensorData.from_numpy(weights * gap**2 / 2))})
        gaps.append(gap[weights != 0])
    every = np.concatenate(gaps)
    metrics = {
        "loss:sum": float(sum(sum(entry["loss"]["data"]) for entry in outputs)),
        "reverse_kl_k1:mean": float(every.mean()) if len(every) else 0.0,
        "num_trained_tokens:sum": float(len(every)),
    }
    return {"type": "mint_forward_backward_reverse_kl", "outputs": outputs, "metrics": metrics}


def _refuse_critic(model: TrainingModel) -> None:
    if model.run.is_critic:
        raise HttpFailure(400, "this client trains a critic, which has values and no tokens to sample")


def _at_once(work: Callable[[Engine], Any]) -> Callable[[Engine], Steps]:
    """An operation without micro-batches."""

    def begin(engine: Engine) -> Steps:
        yield from ()
        return work(engine)

    return begin
