"""Training clients: create and find them, queue their requests, snapshot and park them, restore them after a restart.

With autosave on, a request is written to the journal before it is answered, and its result is added there. A snapshot
every N optimizer steps makes older entries unnecessary. After a restart, the requests since the snapshot run again,
each once: finished ones keep the result that the client already has, the others get theirs now.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import zstandard
from pydantic import ValidationError

from turnwise.client.checkpoints import directory_name, remove_directory
from turnwise.engine.worker import Steps
from turnwise.errors import TurnwiseError
from turnwise.service.access import Caller
from turnwise.service.config import ServeConfig
from turnwise.service.engines import ServedModels
from turnwise.service.failures import HttpFailure, not_found, session_finished
from turnwise.service.futures import Promise, Promises
from turnwise.service.sampling.sampling import Sampling
from turnwise.service.store.store import CRITIC, KIND_KEY, JournalRow, RunRow, Store
from turnwise.service.training.checkpoints import OwnedCheckpoints
from turnwise.service.training.operations import OperationBuilder, TrainingModel, TrainingRequest, parse_request
from turnwise.service.training.parked_adapters import DeviceLimit, ParkedAdapter
from turnwise.service.training.queue import Operation
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire
from turnwise.service.wire.results import JsonReply, outcome_from_journal
from turnwise.types import LoraConfig

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine

log = logging.getLogger(__name__)

OPTIMIZERS = ("adam", "adamw")
MAX_REMEMBERED_KEYS = 10_000
_compress = zstandard.ZstdCompressor(level=1)


class Training:
    """All training clients of the service."""

    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        promises: Promises,
        models: ServedModels,
        checkpoints: OwnedCheckpoints,
        sampling: Sampling,
    ) -> None:
        # The same parts as in `Sampling`, plus `Sampling` itself: each class receives only the parts that it uses.
        self._config = config
        self._store = store
        self._promises = promises
        self._models = models
        self._checkpoints = checkpoints
        self._state = config.data_dir / "state"
        self._live: dict[str, TrainingModel] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._builder = OperationBuilder(
            store, checkpoints, sampling, after_step=self._after_step, after_load=self._after_load
        )

    def __iter__(self) -> Iterator[TrainingModel]:
        return iter(self._live.values())

    def create(self, caller: Caller, body: schemas.CreateModelBody) -> tuple[str, str]:
        """Create a training client; returns its request and model ids. The same call again returns the same ids."""
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        if self._store.session(body.session_id, caller.owner) is None:
            raise not_found("session")
        there = self._store.run(model_id, caller.owner)
        if there is not None:
            self._restore_created(there)
            return there.request_id, model_id
        if self._store.is_finished(body.session_id):
            raise session_finished()
        served = self._models.find(body.base_model)
        served.check_alive()
        if body.optimizer_config.type not in OPTIMIZERS:
            raise HttpFailure(
                400, f"the optimizer {body.optimizer_config.type[:50]!r} is not supported; expected adamw"
            )
        lora = self._read_lora(body)
        if lora.rank > self._config.max_rank:
            raise HttpFailure(400, f"rank={lora.rank}; this service allows up to {self._config.max_rank}")
        request_id = self._promises.new_id()
        now = time.time()
        run = RunRow(
            model_id=model_id,
            session_id=body.session_id,
            owner=caller.owner,
            request_id=request_id,
            base_model=body.base_model,
            lora=lora,
            user_metadata=body.user_metadata or {},
            created_at=now,
            last_request_at=now,
            is_journaled=self._config.autosave > 0,
        )
        self._store.put(run)
        promise = self._promises.create(caller.owner, "CreateModel", 0, request_id=request_id)
        model = self._open(run)
        self._make_room(keep=model)
        created = JsonReply({"type": "create_model", "model_id": model_id})

        def begin(engine: Engine) -> Steps:
            yield from ()
            model.adapter.load(engine)

        served.queue.submit_own(model.lane, Operation(promise=promise, begin=begin, finish=lambda _: created))
        return promise.request_id, model_id

    def _read_lora(self, body: schemas.CreateModelBody) -> LoraConfig:
        """Read what to train. A seed is always set. A critic trains its own head instead of the model's."""
        kind = (body.user_metadata or {}).get(KIND_KEY, "policy")
        if kind not in ("policy", CRITIC):
            raise HttpFailure(400, f"{KIND_KEY}={kind[:50]!r} in user_metadata; expected policy or {CRITIC}")
        lora = body.lora_config
        return wire.read_lora(
            lora.model_copy(
                update={
                    "seed": secrets.randbits(62) if lora.seed is None else lora.seed,
                    "train_unembed": lora.train_unembed and kind != CRITIC,
                }
            )
        )

    def _restore_created(self, run: RunRow) -> None:
        """Restore the promise of a create_model that an earlier process answered."""
        try:
            self._promises.get(run.request_id, run.owner)
        except HttpFailure:
            created = JsonReply({"type": "create_model", "model_id": run.model_id})
            self._promises.restore(run.owner, "CreateModel", run.request_id, created)

    def get(self, model_id: str, owner: str) -> TrainingModel:
        """Return a training client; one that was parked on disk is opened again."""
        model = self._live.get(model_id)
        if model is not None and model.run.owner == owner:
            return model
        run = self._store.run(model_id, owner)
        if run is None:
            raise not_found("model")
        if not run.is_journaled and run.snapshot is None:
            raise HttpFailure(410, self._what_was_lost(run))
        return self._open(run)

    def _what_was_lost(self, run: RunRow) -> str:
        saved = [row.path for row in self._store.checkpoints_of_run(run.model_id, run.owner) if row.kind == "weights"]
        rest = (
            f"its last saved state is {saved[0]}; go on with create_training_client_from_state_with_optimizer"
            if saved
            else "it had no saved state"
        )
        return (
            f"the server was restarted without autosave: the weights that {run.model_id} had in memory are lost; {rest}"
        )

    def _open(self, run: RunRow) -> TrainingModel:
        served = self._models.find(run.base_model)
        lane = served.queue.lane(run.model_id, run.session_id)
        lane.next_seq = run.next_seq
        lane.max_seen = run.next_seq - 1
        snapshots = self._state / directory_name(run.model_id)
        adapter = ParkedAdapter(run.lora, snapshots, run.snapshot, is_critic=run.is_critic)
        model = self._live[run.model_id] = TrainingModel(run, served, adapter, lane)
        return model

    def submit(self, caller: Caller, request: TrainingRequest, *, retry_key: str | None = None) -> str:
        """Accept a request; returns its id. The same sequence number (or retry key) again gives the same id."""
        model = self.get(request.model_id, caller.owner)
        known = self._known(model, request, retry_key)
        if known is not None:
            return known
        if self._store.is_finished(model.run.session_id):
            raise session_finished()
        model.served.check_alive()
        self._promises.check_room(caller.owner, len(request.body))
        request_id = self._promises.new_id()
        operation = self._builder.build(model, request, None, request_id)  # refuses a request that cannot work
        if self._config.autosave:
            self._write_journal(model, request, request_id)
        elif model.run.snapshot is not None or model.run.is_journaled:
            # this request makes the snapshot on disk out of date
            model.run.snapshot, model.run.is_journaled = None, False
            self._store.put(model.run)
        promise = self._promises.create(caller.owner, request.kind, len(request.body), request_id=request_id)
        if self._config.autosave:
            promise.on_done.append(self._record_result)
        operation.promise = promise
        if retry_key is not None:
            self._by_key[model.run.model_id, retry_key] = request_id
            if len(self._by_key) > MAX_REMEMBERED_KEYS:
                del self._by_key[next(iter(self._by_key))]
        if request.seq is not None:
            model.lane.remember(request.seq, request_id)
        model.run.last_request_at = time.time()
        model.served.queue.submit(model.lane, request.seq, operation)
        self._make_room(keep=model)
        return request_id

    def _known(self, model: TrainingModel, request: TrainingRequest, retry_key: str | None) -> str | None:
        if request.seq is not None:
            return model.lane.request_ids.get(request.seq)
        return self._by_key.get((model.run.model_id, retry_key)) if retry_key is not None else None

    def refuse(self, caller: Caller, model_id: str, seq: int) -> None:
        """Skip the number of a request that was refused, so that later requests do not wait for it."""
        try:
            model = self.get(model_id, caller.owner)
        except HttpFailure:
            return
        if seq in model.lane.request_ids or not model.lane.next_seq <= seq < model.lane.next_seq + 10_000:
            return
        if self._config.autosave:
            refused = TrainingRequest(kind="refused", model_id=model_id, seq=seq, body=b"", parsed=None)
            self._write_journal(model, refused, self._promises.new_id())
        model.served.queue.skip(model.lane, seq)

    # journal and snapshots

    def _write_journal(self, model: TrainingModel, request: TrainingRequest, request_id: str) -> None:
        self._store.put(
            JournalRow(
                request_id=request_id,
                model_id=model.run.model_id,
                seq=request.seq,
                after=model.lane.max_seen if request.seq is None else request.seq,
                kind=request.kind,
                body=_compress.compress(request.body),
                result=None,
                created_at=time.time(),
            )
        )

    def _record_result(self, promise: Promise) -> None:
        assert promise.outcome is not None
        failure = promise.outcome.failure
        if failure is not None and not failure.is_final:
            return
        try:
            self._store.finish_journal(promise.request_id, promise.outcome.to_journal())
        except sqlite3.Error as error:
            log.error("the result of %s could not be written: %s", promise.request_id, error)

    def _after_step(self, model: TrainingModel) -> None:
        if self._config.autosave and model.steps_since_snapshot >= self._config.autosave:
            self.snapshot(model)

    def _after_load(self, model: TrainingModel) -> None:
        if self._config.autosave:  # the checkpoint that was loaded may be gone when the journal is replayed
            self.snapshot(model)

    def snapshot(self, model: TrainingModel, *, park: bool = False) -> None:
        """Write the adapter to disk after the running operation; with `park`, free the device too."""
        if model.is_saving:
            return
        model.is_saving = True
        seqs: list[int] = []

        def begin(engine: Engine) -> Steps:
            yield from ()
            try:
                return model.adapter.park(engine) if park else model.adapter.save(engine)
            finally:
                model.is_saving = False

        def finish(name: str) -> JsonReply:
            run = model.run
            if run.is_journaled or model.lane.is_idle:  # else requests outside the journal made the snapshot old
                run.snapshot, run.snapshot_seq, run.next_seq = name, seqs[0], seqs[0] + 1
                self._store.save_snapshot(run)
            model.steps_since_snapshot = 0
            for other in model.adapter.root.iterdir():
                if other.name != name:
                    remove_directory(other)
            return JsonReply({})

        operation = Operation(
            promise=None, begin=begin, finish=finish, prepare=lambda: seqs.append(model.lane.next_seq - 1)
        )
        model.served.queue.submit_own(model.lane, operation)

    def _make_room(self, keep: TrainingModel | None = None) -> None:
        """Park the longest idle adapters while there are too many on the device."""
        resident = [model for model in self._live.values() if model.adapter.is_resident]
        idle = sorted(
            (model for model in resident if model.lane.is_idle and model is not keep and not model.is_saving),
            key=lambda model: model.lane.last_used,
        )
        limit = DeviceLimit(self._config.max_resident_adapters, self._config.max_resident_bytes)
        for model in limit.choose_to_park(resident, idle, lambda model: model.adapter.num_bytes):
            self.snapshot(model, park=True)

    def sweep(self, now: float) -> None:
        """Park adapters that were unused for long, and record when runs were used; `now` is the event loop's clock."""
        for model in self._live.values():
            is_old = now - model.lane.last_used > self._config.park_after_s
            if is_old and model.adapter.is_resident and model.lane.is_idle and not model.is_saving:
                self.snapshot(model, park=True)
            self._store.touch_run(model.run.model_id, model.run.last_request_at)
        self._make_room()

    # restart

    def restore(self) -> None:
        """At start: restore finished results, and run requests again that no snapshot contains."""
        runs = {run.model_id: run for run in self._store.all_runs()}
        snapshots = {directory_name(run.model_id): run.snapshot for run in runs.values()}
        for directory in self._state.glob("*/*"):
            if directory.name != snapshots.get(directory.parent.name):
                remove_directory(directory)
        for model_id in self._store.journaled_models():
            rows = self._store.journal(model_id)
            if model_id in runs:
                self._replay(runs[model_id], rows)

    def _replay(self, run: RunRow, rows: list[JournalRow]) -> None:
        self._restore_created(run)
        model: TrainingModel | None = None
        try:
            model = self._open(run)
        except HttpFailure as error:  # its base model is not served this time
            log.warning("%s is not brought back: %s", run.model_id, error.detail)
        for row in rows:
            if row.result is not None:
                self._promises.restore(run.owner, row.kind, row.request_id, outcome_from_journal(row.result))
            if model is not None:
                if row.seq is not None and row.kind != "refused":
                    model.lane.remember(row.seq, row.request_id)
                if row.body is not None:
                    self._run_again(model, row)

    def _run_again(self, model: TrainingModel, row: JournalRow) -> None:
        queue, lane = model.served.queue, model.lane
        if row.kind == "refused":
            queue.skip(lane, row.seq)
            return
        assert row.body is not None
        body = zstandard.ZstdDecompressor().decompress(row.body)
        try:
            request = parse_request(row.kind, body)
            if row.result is not None and request.changes_nothing:
                queue.skip(lane, row.seq)
                return
            promise = None
            if row.result is None:
                promise = self._promises.create(model.run.owner, row.kind, len(body), request_id=row.request_id)
                promise.on_done.append(self._record_result)
            queue.submit(lane, row.seq, self._builder.build(model, request, promise, row.request_id))
        except (TurnwiseError, ValidationError) as error:
            log.warning("%s: request %s is not run again: %s", row.model_id, row.seq, error)
            queue.skip(lane, row.seq)
