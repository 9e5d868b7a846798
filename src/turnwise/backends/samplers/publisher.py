"""The engine samples in several processes: in samplers of their own, or in learners that sample too.

Every sampler holds the model and the published versions that attempts still use. What a server fleet does for vLLM it
does here: a conversation stays with its sampler, a sampler that is gone loses its requests to another one, a sampler
that comes back loads what it missed before it is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from turnwise.backends import BackendSetup
from turnwise.backends.samplers.dialect import SamplerDialect
from turnwise.backends.servers.dialect import ServerDialect
from turnwise.backends.servers.fleet import Revive
from turnwise.backends.servers.fleet_figures import FleetTimes
from turnwise.backends.servers.publisher import FleetPublisher
from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.local_clients import LocalTrainingClient
from turnwise.engine.engine import Engine
from turnwise.engine.learners.replicated import ReplicatedEngine
from turnwise.engine.samplers.calls import SamplerSetup
from turnwise.engine.samplers.host import SamplerHost
from turnwise.engine.samplers.launcher import SamplerLauncher
from turnwise.engine.samplers.links import DirectLink, SamplerLink
from turnwise.engine.worker import EngineWorker
from turnwise.errors import ConfigError, ServiceError, TurnwiseError
from turnwise.runtime.pending_calls import PENDING_CALLS

_log = logging.getLogger(__name__)

START_S = 300.0
"""Seconds for a sampler to load its model."""
MAX_CHECK_S = 30.0
"""Seconds for a sampler to answer while it samples: one step of its engine, on a busy machine."""
MAX_QUICK_DEATHS = 5
"""How often a sampler may die in a row, each time within `QUICK_S`, before it is not started again."""
QUICK_S = 10.0


class EngineFleet(FleetPublisher):
    """Several engines of ours. They hold whole policies as well as adapters, and several versions of each."""

    takes_full_weights = True
    draws_alternatives = True

    @abstractmethod
    def find_link(self, number: int) -> SamplerLink | None:
        """The way to a sampler as it is now."""

    async def start_servers(self) -> Sequence[str]:
        return [_name(number) for number in range(self.setup.cluster.samplers)]

    def make_dialect(self, url: str) -> ServerDialect:
        number = _number(url)
        return SamplerDialect(url, lambda: self.find_link(number), self.setup.model_directory.name)

    def fleet_times(self) -> FleetTimes:
        deadline_s = self.setup.cluster.deadline_s
        return FleetTimes(
            request_s=deadline_s,
            request_option="cluster.deadline_s",
            check_s=min(MAX_CHECK_S, deadline_s),
            load_s=max(120.0, deadline_s),
        )


class SeparateSamplers(EngineFleet):
    """Samplers in processes or actors of their own (`cluster.placement=separate`)."""

    def __init__(self, setup: BackendSetup) -> None:
        super().__init__(setup)
        self._launcher: SamplerLauncher | None = None
        self._links: dict[int, SamplerLink] = {}
        self._born_s: dict[int, float] = {}
        self._num_quick: dict[int, int] = {}
        self._start_s = 0.0

    def find_link(self, number: int) -> SamplerLink | None:
        return self._links.get(number)

    async def start_servers(self) -> Sequence[str]:
        names, started_s = await super().start_servers(), time.monotonic()
        setup = self.setup
        self._launcher = await asyncio.to_thread(SamplerLauncher, setup.cluster, setup.engine)
        with PENDING_CALLS.listed("samplers", f"load the model ({len(names)} of them)", START_S, is_reason=True):
            done = await asyncio.gather(*(self._start(_number(name)) for name in names), return_exceptions=True)
        for error in [one for one in done if one is not None]:
            raise error
        self._start_s = time.monotonic() - started_s
        return names

    async def stop_servers(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(asyncio.to_thread(link.end) for link in links))

    def find_reviver(self) -> Revive | None:
        return self._revive

    def fleet_times(self) -> FleetTimes:
        # A sampler that died takes as long as before to start again.
        times = super().fleet_times()
        return replace(times, wait_s=max(times.wait_s, 3 * self._start_s + 3 * times.check_s))

    async def _start(self, number: int) -> None:
        assert self._launcher is not None
        setup, engine = self.setup, self._launcher.engine_of(number)
        try:
            link = await asyncio.to_thread(self._launcher.start, number)
        except OSError as cause:
            raise ServiceError(f"{_name(number)} did not start: {cause}") from cause
        self._links[number] = link
        self._born_s[number] = time.monotonic()
        what = SamplerSetup(model_dir=setup.model_directory.resolve(), engine=engine, name=_name(number))
        try:
            async with asyncio.timeout(START_S):
                await asyncio.wrap_future(link.call(what))
        except TimeoutError as cause:
            raise ServiceError(f"{_name(number)} ({link.name}) did not load the model within {START_S:g} s") from cause
        except OSError as cause:
            raise ServiceError(f"{_name(number)} did not start: {cause}") from cause

    async def _revive(self, url: str, _is_stuck: bool) -> bool:
        """Start a sampler again that is gone, or does not answer."""
        number = _number(url)
        before = self._links.pop(number, None)
        is_quick = time.monotonic() - self._born_s[number] < QUICK_S
        self._num_quick[number] = self._num_quick.get(number, 0) + 1 if is_quick else 0
        why = before.why() if before is not None else "it did not start"
        if before is not None:
            await asyncio.to_thread(before.end)
        if self._num_quick[number] >= MAX_QUICK_DEATHS:
            raise ServiceError(f"{url} ended {MAX_QUICK_DEATHS} times in a row, and is given up: {why}")
        try:
            await self._start(number)
        except TurnwiseError as error:
            _log.warning("%s: %s; it did not start again: %s", url, why, error)
            raise
        _log.warning("%s: %s. It was started again (%s)", url, why, self._links[number].name)
        return True


class LearnersThatSample(EngineFleet):
    """The first learners sample too (`cluster.placement=colocated` with `cluster.samplers` above 1)."""

    def __init__(self, setup: BackendSetup) -> None:
        super().__init__(setup)
        self._engine: Engine | None = None
        self._own: DirectLink | None = None

    async def deliver(self, trainer: TrainingClient, version: int) -> SamplingClient:
        if self._own is None:
            worker = _worker_of(trainer)
            self._engine, self._own = worker.engine, DirectLink(SamplerHost(worker))
        return await super().deliver(trainer, version)

    def find_link(self, number: int) -> SamplerLink | None:
        if number == 0:
            return self._own
        assert isinstance(self._engine, ReplicatedEngine), "several learners train"
        return self._engine.sampler_link(number)


def _worker_of(trainer: TrainingClient) -> EngineWorker:
    if not isinstance(trainer, LocalTrainingClient):
        raise ConfigError(
            f"cluster.samplers samples on the learners of this run, and {type(trainer).__name__} trains elsewhere; "
            "leave it out"
        )
    return trainer.worker


def _name(number: int) -> str:
    return f"sampler {number}"


def _number(name: str) -> int:
    return int(name.rpartition(" ")[2])
