"""The service: all parts that the routes call, and a task that cleans up at intervals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence

from turnwise.client.engines import LoadedModel
from turnwise.service.access import Access, Caller
from turnwise.service.config import ServeConfig
from turnwise.service.engines import ServedModels
from turnwise.service.failures import HttpFailure, not_found
from turnwise.service.futures import KEEP_S, Promises
from turnwise.service.named_policies import NamedPolicy
from turnwise.service.sampling.interpolate import Interpolation
from turnwise.service.sampling.sampling import Sampling
from turnwise.service.store.captures import CaptureStore
from turnwise.service.store.store import OwnedCheckpointRow, SessionRow, Store
from turnwise.service.training.checkpoints import OwnedCheckpoints
from turnwise.service.training.training import Training
from turnwise.service.wire import schemas
from turnwise.service.wire.screen import BodyScreen

log = logging.getLogger(__name__)

SWEEP_S = 10.0


class Service:
    """All parts of the service. Create it on the event loop that will serve it, after the models are loaded."""

    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        models: Mapping[str, LoadedModel],
        policies: Sequence[NamedPolicy] = (),
    ) -> None:
        self.config = config
        self.store = store
        self.access = Access(store, is_loopback=config.is_loopback, token_s=config.token_s)
        self.promises = Promises(
            max_queued_bytes=config.max_queued_bytes,
            max_queued_requests=config.max_queued_requests,
            max_kept_bytes=config.max_kept_result_bytes,
        )
        self.models = ServedModels(models, self.promises, gap_s=config.gap_s, policies=policies)
        self.checkpoints = OwnedCheckpoints(store, config.data_dir)
        self.sampling = Sampling(config, store, self.promises, self.models, self.checkpoints)
        self.training = Training(config, store, self.promises, self.models, self.checkpoints, self.sampling)
        self.interpolation = Interpolation(store, self.promises, self.models, self.checkpoints)
        self.captures = CaptureStore(config.data_dir)
        self.screen = BodyScreen()
        self._last_seen: dict[str, float] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Clean up after an earlier process, continue its work, and start the periodic clean-up."""
        self.checkpoints.clean()
        self.sampling.clean()
        self.training.restore()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_forever())

    async def close(self) -> None:
        """Stop; the journal holds what was not finished."""
        self.promises.close()
        self.screen.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        for model in self.models:
            await model.queue.close()
        await self.sampling.close()
        await asyncio.to_thread(self.models.close)
        await asyncio.sleep(0)  # failures of the engines' shutdown are recorded before the database is closed
        self.store.close()
        self.captures.close()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self.sweep()
            except (OSError, sqlite3.Error) as error:
                log.error("the periodic clean-up failed and will be tried again: %s", error)

    def sweep(self) -> None:
        """Remove expired and unused objects."""
        now = asyncio.get_running_loop().time()
        self.promises.sweep()
        self.checkpoints.sweep()
        self.training.sweep(now)
        self.sampling.sweep(now)
        self.store.forget_journal(time.time() - KEEP_S)
        for session_id, seen in self._last_seen.items():
            self.store.touch_session(session_id, seen)
        self._last_seen.clear()

    async def copy_checkpoint(self, source: OwnedCheckpointRow, target: OwnedCheckpointRow) -> OwnedCheckpointRow:
        """Copy a checkpoint's files beside the event loop, and record it."""
        written = await asyncio.to_thread(self.checkpoints.copy, source, target)
        self.store.put(written)
        return written

    def create_session(self, caller: Caller, body: schemas.CreateSessionBody) -> SessionRow:
        now = time.time()
        row = SessionRow(
            session_id=str(uuid.uuid4()),
            owner=caller.owner,
            created_at=now,
            last_seen_at=now,
            tags=body.tags,
            user_metadata=body.user_metadata or {},
            sdk_version=body.sdk_version,
            project_id=body.project_id,
            display_name=body.display_name,
        )
        self.store.put(row)
        return row

    def session(self, session_id: str, caller: Caller) -> SessionRow:
        row = self.store.session(session_id, caller.owner)
        if row is None:
            raise not_found("session")
        return row

    def heartbeat(self, session_id: str, caller: Caller) -> None:
        if self.session(session_id, caller).finished is not None:
            raise HttpFailure(410, "this session is finished")
        self._last_seen[session_id] = time.time()
