"""Sums of checkpoints: the output changes every base weight by the weighted sum of what its sources change."""

from __future__ import annotations

import math
import time
import uuid
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.client.checkpoints import verify
from turnwise.service.access import Caller
from turnwise.service.engines import ServedModels
from turnwise.service.failures import HttpFailure
from turnwise.service.futures import Promises
from turnwise.service.store.store import OwnedCheckpointRow, Store
from turnwise.service.training.checkpoints import OwnedCheckpoints
from turnwise.service.training.queue import Operation, Steps
from turnwise.service.wire import schemas
from turnwise.service.wire.results import JsonReply

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine

MAX_REMEMBERED = 1000


class Interpolation:
    """Makes new sampler weights out of saved ones."""

    def __init__(self, store: Store, promises: Promises, models: ServedModels, checkpoints: OwnedCheckpoints) -> None:
        self._store = store
        self._promises = promises
        self._models = models
        self._checkpoints = checkpoints
        self._by_key: OrderedDict[tuple[str, str], str] = OrderedDict()

    def submit(self, caller: Caller, body: schemas.InterpolateBody, *, retry_key: str | None) -> str:
        if retry_key is not None and (caller.owner, retry_key) in self._by_key:
            return self._by_key[caller.owner, retry_key]
        row, sources = self._plan(caller, body)
        served = self._models.find(row.base_model)
        promise = self._promises.create(caller.owner, "MintInterpolateCheckpoints", 0)
        row = replace(row, request_id=promise.request_id)

        def begin(engine: Engine) -> Steps:
            yield from ()
            return self._write(engine, row, sources, body.coefficients)

        def finish(written: OwnedCheckpointRow) -> JsonReply:
            self._store.put(written)
            return JsonReply(
                {
                    "type": "mint_interpolate_checkpoints",
                    "path": written.path,
                    "checkpoint_type": "sampler",
                    "source_paths": body.source_paths,
                    "coefficients": body.coefficients,
                    "has_rank_shards": False,
                }
            )

        lane = served.queue.lane(f"interpolate:{caller.owner}", f"interpolate:{caller.owner}")
        operation = Operation(
            promise=promise,
            begin=begin,
            finish=finish,
            prepare=lambda: self._checkpoints.check_name(row, overwrite=False),
            needs_quiet=True,
        )
        served.queue.submit_own(lane, operation)
        if retry_key is not None:
            self._by_key[caller.owner, retry_key] = promise.request_id
            if len(self._by_key) > MAX_REMEMBERED:
                self._by_key.popitem(last=False)
        return promise.request_id

    def _plan(self, caller: Caller, body: schemas.InterpolateBody) -> tuple[OwnedCheckpointRow, list[Path]]:
        if len(body.source_paths) != len(body.coefficients):
            raise HttpFailure(400, f"{len(body.source_paths)} source_paths but {len(body.coefficients)} coefficients")
        if not all(math.isfinite(coefficient) for coefficient in body.coefficients):
            raise HttpFailure(400, "coefficients must be finite numbers")
        if body.output_checkpoint_type != "sampler":
            raise HttpFailure(400, f"output_checkpoint_type={body.output_checkpoint_type[:50]!r}; expected sampler")
        rows = [self._checkpoints.find(path, caller.owner) for path in body.source_paths]
        if len({id(self._models.find(row.base_model)) for row in rows}) > 1:
            raise HttpFailure(400, "the sources belong to different base models")
        own = next((row.model_id for row in rows if row.owner == caller.owner), f"{uuid.uuid4()}:interpolated:0")
        name = (body.output_path or f"interpolated-{uuid.uuid4().hex[:12]}").rpartition("/")[2]
        target = OwnedCheckpointRow(
            model_id=own,
            kind="sampler_weights",
            name=name,
            owner=caller.owner,
            request_id="",
            base_model=rows[0].base_model,
            lora=rows[0].lora,
            has_optimizer=False,
            created_at=time.time(),
            size_bytes=0,
        )
        self._checkpoints.check_name(target, overwrite=False)
        return target, [self._checkpoints.directory(row) for row in rows]

    def _write(self, engine: Engine, row: OwnedCheckpointRow, sources: list[Path], coefficients: list[float]) -> Any:
        from turnwise.engine.training.snapshots import write_sum  # torch

        for source in sources:
            verify(source)
        shape: list[Any] = []
        written = self._checkpoints.write(
            row,
            str(engine.model_dir),
            lambda directory: shape.append(write_sum(engine, sources, coefficients, directory)),
        )
        return replace(written, lora=shape[0])
