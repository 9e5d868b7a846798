"""Sampling sessions: the weights to sample from, and a queue in which sessions take turns.

The engine batches all its requests, so requests of all sessions decode together. To stay fair, it gets at most twice as
many sequences as it can run at once. Of the waiting requests, the session that was served least goes next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.client.checkpoints import directory_name, remove_directory
from turnwise.errors import DataError
from turnwise.service.access import Caller
from turnwise.service.config import ServeConfig
from turnwise.service.engines import ServedModel, ServedModels
from turnwise.service.failures import HttpFailure, not_found, session_finished, to_failure
from turnwise.service.futures import Promise, Promises, QueueState
from turnwise.service.store.store import RunRow, SamplerRow, Store
from turnwise.service.training.checkpoints import OwnedCheckpoints
from turnwise.service.training.parked_adapters import DeviceLimit, ParkedPolicy
from turnwise.service.training.queue import FairShare
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire
from turnwise.service.wire.results import RequestFailure, RequestOutcome, SampleReply
from turnwise.types import Datum, ModelInput, SampleRequest, SampleResponse, TensorData

log = logging.getLogger(__name__)

MAX_REMEMBERED = 20_000
MAX_COMPLETIONS = 20_000
KEEP_PUBLISHED_S = 6 * 3600.0
"""Seconds after which unused published weights without a name are deleted."""


@dataclass(slots=True, eq=False)
class SamplingSession:
    """One sampling session."""

    row: SamplerRow
    served: ServedModel
    weights: ParkedPolicy
    last_used: float
    num_running: int = 0
    request_ids: OrderedDict[int, str] = field(default_factory=OrderedDict)
    completions: deque[tuple[int, int, str, bool]] = field(default_factory=lambda: deque(maxlen=MAX_COMPLETIONS))
    """(number, clone, request, whether it worked), in the order of completion."""
    num_completed: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _QueuedSample:
    sampler: SamplingSession
    request: wire.ServedSample
    promise: Promise
    seq: int
    on_token: Callable[[int, int, float], None] | None = None

    @property
    def num_samples(self) -> int:
        return self.request.sample.num_samples


@dataclass(slots=True, eq=False)
class _Line:
    """Requests that wait for one engine."""

    max_running: int
    jobs: dict[str, deque[_QueuedSample]] = field(default_factory=dict)
    share: FairShare = field(default_factory=FairShare)
    num_running: int = 0

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self.jobs.values())


class Sampling:
    """All sampling sessions of the service."""

    def __init__(
        self, config: ServeConfig, store: Store, promises: Promises, models: ServedModels, checkpoints: OwnedCheckpoints
    ) -> None:
        self._config = config
        self._store = store
        self._promises = promises
        self._models = models
        self._checkpoints = checkpoints
        self._root = config.data_dir / "published"
        self._live: dict[str, SamplingSession] = {}
        self._lines = {model.name: _Line(2 * config.engine.max_num_seqs) for model in models}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()

    # sessions

    def create(self, caller: Caller, body: schemas.CreateSamplingSessionBody) -> str:
        if self._store.session(body.session_id, caller.owner) is None:
            raise not_found("session")
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if self._store.sampler(sampler_id, caller.owner) is not None:
            return sampler_id
        if self._store.is_finished(body.session_id):
            raise session_finished()
        row = SamplerRow(
            sampler_id=sampler_id,
            session_id=body.session_id,
            owner=caller.owner,
            base_model=body.base_model or "",
            source="base",
            created_at=time.time(),
        )
        if body.model_path is not None:
            checkpoint = self._checkpoints.find(body.model_path, caller.owner)
            row = replace(row, source="checkpoint", model_path=checkpoint.path, base_model=checkpoint.base_model)
        elif body.base_model is None:
            raise HttpFailure(400, "send model_path (saved weights) or base_model")
        elif (named := self._models.policies.get(body.base_model)) is not None:
            row = replace(row, source="policy", model_path=named.identity, base_model=named.base_model)
        served, weights = self._find_weights(row)
        self._store.put(row)
        self._live[sampler_id] = SamplingSession(row, served, weights, self._loop.time())
        return sampler_id

    def published_row(self, run: RunRow, seq: int) -> SamplerRow:
        sampler_id = f"{run.session_id}:sample:{seq}"
        return SamplerRow(
            sampler_id=sampler_id,
            session_id=run.session_id,
            owner=run.owner,
            base_model=run.base_model,
            source="published",
            directory=directory_name(sampler_id) if self._config.autosave else None,
            created_at=time.time(),
        )

    def directory_of(self, row: SamplerRow) -> Path | None:
        return None if row.directory is None else self._root / row.directory

    def add(self, row: SamplerRow, served: ServedModel, weights: ParkedPolicy) -> None:
        """Take over weights that a training client published."""
        self._store.put(row)
        self._live[row.sampler_id] = SamplingSession(row, served, weights, self._loop.time())
        self._make_room()

    def get(self, sampler_id: str, owner: str) -> SamplingSession:
        sampler = self._live.get(sampler_id)
        if sampler is not None and sampler.row.owner == owner:
            return sampler
        row = self._store.sampler(sampler_id, owner)
        if row is None:
            raise not_found("sampler")
        served, weights = self._find_weights(row)
        sampler = self._live[sampler_id] = SamplingSession(row, served, weights, self._loop.time())
        return sampler

    def _find_weights(self, row: SamplerRow) -> tuple[ServedModel, ParkedPolicy]:
        served = self._models.find(row.base_model)
        if row.source == "base":
            return served, ParkedPolicy(None, is_base=True)
        if row.source == "checkpoint":
            assert row.model_path is not None
            checkpoint = self._checkpoints.find(row.model_path, row.owner)
            return served, ParkedPolicy(self._checkpoints.directory(checkpoint))
        if row.source == "policy":
            assert row.model_path is not None
            return served, ParkedPolicy(self._models.find_policy(row.model_path).directory)
        directory = self.directory_of(row)
        if directory is None or not directory.is_dir():
            raise HttpFailure(
                410,
                "these weights were published without a name and are gone (the server was restarted without autosave, "
                "or nobody used them for hours); publish them again",
            )
        return served, ParkedPolicy(directory)

    def join(self, sampler_id: str, owner: str) -> int:
        sampler = self.get(sampler_id, owner)
        sampler.row.num_joined += 1
        self._store.put(sampler.row)
        return sampler.row.num_joined

    def reference_weights(self, path: str, owner: str, served: ServedModel) -> ParkedPolicy:
        """Find the weights that a reverse KL is measured against: a checkpoint of the same base model, or the base."""
        if "://" not in path:
            if self._models.find(path) is not served:
                raise HttpFailure(400, f"the reference {path[:200]!r} is another base model than the student's")
            return ParkedPolicy(None, is_base=True)
        row = self._checkpoints.find(path, owner)
        if self._models.find(row.base_model) is not served:
            raise HttpFailure(400, f"{row.path} belongs to the base model {row.base_model}")
        return ParkedPolicy(self._checkpoints.directory(row))

    # requests

    def num_running(self, model: str) -> int:
        """Sequences that the engine of that model was given and has not finished."""
        return self._lines[model].num_running

    def submit(self, caller: Caller, body: schemas.SampleBody, num_bytes: int) -> tuple[str, list[str]]:
        """Accept a request; returns its id and one id per sequence. The same `seq_id` again gives the same."""
        sampler = self.get(body.sampling_session_id, caller.owner)
        sequence_ids = [f"{sampler.row.sampler_id}:{body.seq_id}:{index}" for index in range(body.num_samples)]
        known = sampler.request_ids.get(body.seq_id)
        if known is not None:
            return known, sequence_ids
        request = wire.read_sample(body)
        promise = self.enqueue(sampler, request, seq=body.seq_id, num_bytes=num_bytes)
        sampler.request_ids[body.seq_id] = promise.request_id
        if len(sampler.request_ids) > MAX_REMEMBERED:
            sampler.request_ids.popitem(last=False)
        return promise.request_id, sequence_ids

    def enqueue(
        self,
        sampler: SamplingSession,
        request: wire.ServedSample,
        *,
        seq: int,
        num_bytes: int,
        on_token: Callable[[int, int, float], None] | None = None,
    ) -> Promise:
        """Put a request in line; `on_token` hears of each token as it is drawn, on the engine's thread."""
        owner = sampler.row.owner
        if self._store.is_finished(sampler.row.session_id):
            raise session_finished()
        sampler.served.check_alive()
        self._promises.check_room(owner, num_bytes)
        promise = self._promises.create(owner, "Sample", num_bytes)
        sampler.last_used = self._loop.time()
        job = _QueuedSample(sampler, request, promise, seq, on_token)
        line = self._lines[sampler.served.name]
        promise.why_waiting = lambda: self._why_waiting(line, job)
        promise.on_cancel = lambda: self._drop(line, job)
        line.jobs.setdefault(sampler.row.session_id, deque()).append(job)
        self._pump(line)
        return promise

    def _why_waiting(self, line: _Line, job: _QueuedSample) -> tuple[QueueState, str | None]:
        waiting = line.jobs.get(job.sampler.row.session_id, ())
        if job in waiting:
            return "paused_capacity", f"{line.num_running} sequences are being sampled, {len(line)} requests wait"
        return "active", None

    def _drop(self, line: _Line, job: _QueuedSample) -> None:
        waiting = line.jobs.get(job.sampler.row.session_id)
        if waiting is not None and job in waiting:
            waiting.remove(job)
            self._settle(job, RequestFailure("cancelled", "user"))

    def _pump(self, line: _Line) -> None:
        while True:
            for session in [name for name, jobs in line.jobs.items() if not jobs]:
                del line.jobs[session]
            if not line.jobs:
                line.share.keep_only(())
                return
            session = line.share.choose(line.jobs)
            job = line.jobs[session][0]
            if line.num_running and line.num_running + job.num_samples > line.max_running:
                return
            line.jobs[session].popleft()
            line.share.charge(session, job.num_samples)
            self._start(line, job)

    def _start(self, line: _Line, job: _QueuedSample) -> None:
        line.num_running += job.num_samples
        job.sampler.num_running += 1
        task = self._loop.create_task(self._sample(job))
        self._tasks.add(task)
        job.promise.on_cancel = task.cancel  # pyright: ignore[reportAttributeAccessIssue]

        def done(task: asyncio.Task[SampleReply]) -> None:
            self._tasks.discard(task)
            line.num_running -= job.num_samples
            job.sampler.num_running -= 1
            job.sampler.last_used = self._loop.time()
            if task.cancelled():
                self._settle(job, RequestFailure("cancelled", "user"))
            else:
                error = task.exception()
                self._settle(job, task.result() if error is None else to_failure(error))
            self._pump(line)

        task.add_done_callback(done)

    def _settle(self, job: _QueuedSample, outcome: RequestOutcome) -> None:
        sampler = job.sampler
        self._promises.settle(job.promise, outcome)
        sampler.num_completed += 1
        is_good = outcome.failure is None
        sampler.completions.append((sampler.num_completed, job.seq // 10**9, job.promise.request_id, is_good))
        sampler.news.set()
        sampler.news = asyncio.Event()

    async def _sample(self, job: _QueuedSample) -> SampleReply:
        worker, request = job.sampler.served.loaded.worker, job.request
        policy = job.sampler.weights.resident(worker.engine)
        if policy is None:
            policy = await asyncio.wrap_future(worker.run("samplers", job.sampler.weights.load))
            self._make_room()
        tokens = list(request.sample.prompt)
        response = await asyncio.wrap_future(worker.sample(request.sample, policy, on_token=job.on_token))
        response = _only_last(response, request.last_n)
        topk = targets = None
        if request.topk_sample_logprobs:
            topk = await self._topk_sampled(job, policy, tokens, response)
        if request.targets is not None:
            targets = await self._score_targets(job, policy, tokens, request.targets)
        return SampleReply(response=response, topk_sampled=topk, target_logprobs=targets)

    async def _topk_sampled(self, job: _QueuedSample, policy: Any, prompt: list[int], response: SampleResponse) -> Any:
        """Read the sampled tokens once more for their best alternatives; logprobs are at temperature 1."""
        worker = job.sampler.served.loaded.worker
        rows: list[Any] = []
        for sequence in response.sequences:
            whole = [*prompt, *sequence.tokens]
            if len(whole) >= job.sampler.served.max_context_length:
                raise DataError("topk_sample_logprobs needs a context that is not full; lower max_tokens")
            asked = replace(SampleRequest.scoring(whole), topk_prompt_logprobs=job.request.topk_sample_logprobs)
            scored = await asyncio.wrap_future(worker.sample(asked, policy))
            assert scored.topk_prompt_logprobs is not None
            rows.append(scored.topk_prompt_logprobs[len(prompt) :])
        return rows

    async def _score_targets(
        self, job: _QueuedSample, policy: Any, prompt: list[int], targets: np.ndarray
    ) -> TensorData:
        """[prompt - 1, K] the logprobs of chosen ids at every position, in one forward pass over one tree."""
        asked = targets >= 0
        datums = [
            Datum(
                model_input=ModelInput.from_ints(prompt[:-1]),
                loss_fn_inputs={"target_tokens": np.where(asked[:, k], targets[:, k], 0)},
            )
            for k in range(targets.shape[1])
        ]
        worker = job.sampler.served.loaded.worker
        output = await asyncio.wrap_future(worker.run_steps("samplers", lambda engine: engine.score(policy, datums)))
        columns = [entry["logprobs"].to_numpy() for entry in output.loss_fn_outputs]
        return TensorData.from_numpy(np.where(asked, np.stack(columns, axis=1), 0.0).astype(np.float32))

    # room

    def _make_room(self) -> None:
        """Free the weights that were unused for longest while too many are on the device; write them to disk first."""
        resident = [sampler for sampler in self._live.values() if sampler.weights.is_resident]
        idle = sorted((s for s in resident if not s.num_running), key=lambda s: s.last_used)
        limit = DeviceLimit(self._config.max_resident_policies, self._config.max_resident_bytes)
        for sampler in limit.choose_to_park(resident, idle, lambda sampler: sampler.weights.num_bytes):
            self._release(sampler)

    def _release(self, sampler: SamplingSession) -> None:
        row = sampler.row
        directory = self._root / directory_name(row.sampler_id)

        def release(engine: Any) -> None:
            sampler.weights.write(engine, directory)
            sampler.weights.park()

        if row.source == "published" and row.directory is None:
            row.directory = directory.name
            self._store.put(row)
        sampler.served.loaded.worker.run("samplers", release)

    def sweep(self, now: float) -> None:
        """Forget unused samplers; `now` is the event loop's clock."""
        for sampler_id, sampler in list(self._live.items()):
            if sampler.num_running or now - sampler.last_used < KEEP_PUBLISHED_S:
                continue
            del self._live[sampler_id]
            if sampler.row.source == "published" and sampler.row.directory is not None:
                remove_directory(self._root / sampler.row.directory)

    def clean(self) -> None:
        """At start: remove published weights that no sampler knows."""
        known = self._store.sampler_directories()
        for directory in self._root.glob("*"):
            is_old = time.time() - directory.stat().st_mtime > KEEP_PUBLISHED_S
            if directory.name not in known or is_old:
                remove_directory(directory)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)


def _only_last(response: SampleResponse, last_n: int | None) -> SampleResponse:
    """Blank the prompt's scores before its last `last_n` tokens."""
    if last_n is None or response.prompt_logprobs is None:
        return response
    num_blank = max(len(response.prompt_logprobs) - last_n, 0)

    def blanked(rows: Any) -> Any:
        return None if rows is None else [None] * num_blank + list(rows[num_blank:])

    return replace(
        response,
        prompt_logprobs=blanked(response.prompt_logprobs),
        topk_prompt_logprobs=blanked(response.topk_prompt_logprobs),
    )
