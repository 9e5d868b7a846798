"""Several servers as one sampler.

A request goes to the server that read the conversation so far, or to the least loaded one. A server that fails a
request is taken out, and the request is sent again elsewhere. One task per server looks after it: it checks the
server's health, brings it back when it answers again, and loads versions that it missed. A request of some version goes
only to servers that have that version loaded, so a server that lags behind a publication is not asked for it.

Everything here runs in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from turnwise.backends.servers.dialect import ServedWeights, ServerDialect, ServerFacts, as_sleeper, bring_weights
from turnwise.backends.servers.fleet_figures import FleetStats, FleetTimes
from turnwise.backends.servers.http import ServerGoneError, ServerLateError, is_stuck, is_unreachable
from turnwise.backends.servers.probe import Probe, check_answer
from turnwise.backends.servers.routing import KnownPrefix, PrefixRoutes
from turnwise.errors import ConfigError, ServiceError, TurnwiseError
from turnwise.runtime.pending_calls import PENDING_CALLS
from turnwise.types import SampledSequence, SampleRequest, SampleResponse

Revive = Callable[[str, bool], Awaitable[bool]]
"""Starts the server at an address again if it does not answer, or, by the second argument, if it is known to be stuck
whatever it says; returns whether it did."""
MAX_TRIES, MAX_SCORING_TRIES, MAX_LATE_TRIES = 4, 2, 2
"""Servers that one request is sent to before it fails. A vLLM on a CPU may end when a prompt is scored beside requests
of another process; such a request must not end a whole fleet. A reply that is late twice is too long for the deadline.
"""
NUM_MISSED_CHECKS = 2
"""Health checks in a row without an answer that take a server out."""
CANCEL_GRACE_S = 1.0
"""How long a cancelled call of a server may take to clean up."""
NUM_STUCK = 3
"""Tries in a row to let a server in, on which it accepted requests and gave no answer, after which one that is ours is
started again: it may say that it is well while its engine hangs."""


class _Server:
    """What the fleet knows of one server."""

    def __init__(self, dialect: ServerDialect) -> None:
        self.dialect = dialect
        self.is_ready = False
        self.was_ready = False
        self.is_tried = asyncio.Event()
        """Whether it was asked at least once if it can take requests."""
        self.wake = asyncio.Event()
        self.why_out = "it has not answered yet"
        self.wrong: TurnwiseError | None = None
        """Whether it answers, but is not what the run needs."""
        self.loaded: set[str] = set()
        self.unwanted: dict[str, ServedWeights] = {}
        """Adapters that no attempt uses any more, and that it may still hold because it was down at that moment."""
        self.is_asleep = False
        self.replacing = asyncio.Lock()
        """Held while its whole weights are replaced."""
        self.num_running = 0
        self.num_served = 0
        self.num_missed = 0
        self.num_stuck = 0
        """Tries in a row to let it in, on which something listened and did not answer."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server is known to be gone: requests under way there are given up."""

    @property
    def url(self) -> str:
        return self.dialect.url

    def has(self, weights: ServedWeights) -> bool:
        return weights.name is None or weights.name in self.loaded

    def give_up_requests(self) -> None:
        self.lost.set_result(None)
        self.lost = asyncio.get_running_loop().create_future()


class Fleet:
    """Samples on whichever of its servers is best. Use all its methods in one event loop."""

    def __init__(
        self,
        dialects: Sequence[ServerDialect],
        *,
        times: FleetTimes,
        check_facts: Callable[[str, ServerFacts], None] = lambda _url, _facts: None,
        probe: Probe | None = None,
        revive: Revive | None = None,
    ) -> None:
        """Args:
        check_facts: Raises `ConfigError` where a server, named by its address, is not what the run needs.
        probe: What a server must draw before it takes requests.
        revive: Starts a server again that does not answer, where it is ours to start.
        """
        self.times = times
        self.stats = FleetStats()
        self._servers = [_Server(dialect) for dialect in dialects]
        self._check_facts = check_facts
        self._probe = probe or Probe()
        self._revive = revive
        self._live: dict[str, ServedWeights] = {}
        """Published adapters that a request may still ask for, oldest first."""
        self._routes = PrefixRoutes()
        self._changed = asyncio.Condition()
        self._keepers: list[asyncio.Task[None]] = []
        self._waking = asyncio.Lock()
        self._is_resting = False
        """Whether the servers gave their memory back; they get no request until they are woken."""

    @property
    def num_ready(self) -> int:
        return sum(server.is_ready for server in self._servers)

    async def start(self) -> None:
        """Wait until every server was asked once, and one of them can take requests."""
        self._keepers = [asyncio.create_task(self._look_after(server)) for server in self._servers]
        for server in self._servers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.is_tried.wait(), self.times.wait_s)
            if server.wrong is not None:
                raise server.wrong
        addresses = ", ".join(server.url for server in self._servers)
        with PENDING_CALLS.listed("servers", f"answer ({addresses})", self.times.wait_s, is_reason=True):
            is_any_ready = await self._until(lambda: self.num_ready > 0, self.times.wait_s)
        if not is_any_ready:
            raise ServiceError(
                f"no server can sample, after {self.times.wait_s:g} s (rollout.server_wait_s): {self._why_out()}; "
                "start the server, or correct rollout.url"
            )

    async def publish(self, weights: ServedWeights) -> None:
        """Load an adapter on every server. Returns when all have it, or when one has it and the others lag too far."""
        if weights.name is None:
            return
        await self.wake()
        self._live[weights.name] = weights
        loads = {
            asyncio.create_task(self._load(server, weights)): server for server in self._servers if server.is_ready
        }
        try:
            errors = await self._await_loads(loads)
            late = [server for task, server in loads.items() if not task.done()]
        finally:
            await _cancel_all(loads)
        if not any(server.is_ready and server.has(weights) for server in self._servers):
            refusals = [error for error in errors if not isinstance(error, ServerGoneError)]
            if errors and len(refusals) == len(errors):  # they are well, and do not want it
                del self._live[weights.name]
                raise ServiceError(f"version {weights.version} cannot be published: {refusals[0]}") from refusals[0]
            if not await self._until(lambda: self._has_any(weights), self.times.wait_s):
                del self._live[weights.name]
                raise ServiceError(f"version {weights.version} reached no server: {self._why_out()}")
        fenced = [server for server in self._servers if server.is_ready or server in late]
        self.stats.num_fenced += sum(not server.has(weights) for server in fenced)

    async def retire(self, weights: ServedWeights) -> None:
        """Unload an adapter that nobody uses any more; a server that is down or asleep does it when it is back."""
        if weights.name is None:
            return
        self._live.pop(weights.name, None)
        for server in self._servers:
            server.loaded.discard(weights.name)
            if not weights.is_whole:  # newer weights have replaced those
                server.unwanted[weights.name] = weights
        await asyncio.gather(*(self._unload(server) for server in self._servers if server.is_ready))

    async def rest(self) -> None:
        """Have all servers give their memory back, once their requests are done, until something is asked of them."""
        async with self._waking:
            self._is_resting = True
            await self._until(lambda: not any(server.num_running for server in self._servers), self.times.request_s)
            await asyncio.gather(*(self._sleep(server) for server in self._servers if server.is_ready))

    async def wake(self) -> None:
        """Have all servers take their memory again. One that does not is taken out, and started again if it is ours."""
        async with self._waking:
            await asyncio.gather(*(self._wake_or_take_out(server) for server in self._servers if server.is_asleep))
            self._is_resting = False

    async def _sleep(self, server: _Server) -> None:
        server.is_asleep = True  # also if the call fails: it may sleep, so it is woken before it is used
        try:
            async with asyncio.timeout(self.times.request_s):
                await as_sleeper(server.dialect).sleep()
        except (TimeoutError, ServiceError) as error:
            self._take_out(server, f"it did not give its memory back: {error or 'no answer'}")

    async def _wake_or_take_out(self, server: _Server) -> None:
        try:
            await self._wake(server)
        except ServiceError as error:
            self._take_out(server, str(error))
            return
        await self._unload(server)

    async def _wake(self, server: _Server) -> None:
        """Wake a server that sleeps, or may."""
        try:
            async with asyncio.timeout(self.times.request_s):
                await as_sleeper(server.dialect).wake()
        except (TimeoutError, ServiceError) as cause:
            server.is_asleep = not is_unreachable(cause)
            why = str(cause) or f"no answer within {self.times.request_s:g} s"
            raise ServerGoneError(f"{server.url} did not wake up: {why}") from cause
        server.is_asleep = False

    async def generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        """Sample on the best server, and on another one if it fails."""
        if self._is_resting:
            await self.wake()
        failed: list[str] = []
        num_late = 0
        self.stats.num_requests += 1
        while True:
            server = await self._choose(request, weights, failed)
            self._routes.remember(weights.name, request.prompt, KnownPrefix(server.url, is_reply=False))
            try:
                response = await self._try(server, request, weights)
                check_answer(response, request, server.url)
            except ServerGoneError as error:
                self._take_out(server, str(error))
                failed.append(server.url)
                num_late += isinstance(error, ServerLateError)
                most = MAX_SCORING_TRIES if request.include_prompt_logprobs else MAX_TRIES
                if len(failed) >= most or num_late >= MAX_LATE_TRIES:
                    raise ServiceError(f"{len(failed)} servers failed this request; the last one: {error}") from error
                self.stats.num_retries += 1
                continue
            self.stats.num_prompt_tokens += len(request.prompt)
            self.stats.num_cached_tokens += min(response.num_cached_prompt_tokens, len(request.prompt))
            route = KnownPrefix(server.url, is_reply=True)
            for sequence in response.sequences:
                self._routes.remember(weights.name, [*request.prompt, *sequence.tokens], route)
            return response

    async def draw_on_each(self, request: SampleRequest, weights: ServedWeights) -> dict[str, SampledSequence]:
        """One reply of each server that can give one, by address."""
        drawn: dict[str, SampledSequence] = {}
        for server in [server for server in self._servers if server.is_ready and server.has(weights)]:
            try:
                answer = await self._try(server, request, weights)
                check_answer(answer, request, server.url)
                drawn[server.url] = answer.sequences[0]
            except ServerGoneError as error:
                self._take_out(server, str(error))
        return drawn

    async def close(self) -> None:
        """Stop looking after the servers, and close the connections. The servers themselves stay."""
        await _cancel_all(self._keepers)
        await asyncio.gather(*(server.dialect.close() for server in self._servers), return_exceptions=True)

    async def _choose(self, request: SampleRequest, weights: ServedWeights, failed: Sequence[str]) -> _Server:
        """The server for a request; waits for one where none can take it."""
        if not await self._until(lambda: self._has_any(weights), self.times.wait_s):
            raise ServiceError(f"no server could sample for {self.times.wait_s:g} s: {self._why_out()}")
        able = [server for server in self._servers if server.is_ready and server.has(weights)]
        able = [server for server in able if server.url not in failed] or able
        least = min(able, key=lambda server: (server.num_running, server.num_served))
        known = self._routes.find(weights.name, request.prompt)
        sticky = next((server for server in able if known is not None and server.url == known.server), None)
        if sticky is None or known is None:
            return least
        # A conversation that goes on is worth some waiting. A new one that begins like another saves one prompt only,
        # and would burden that server to its end.
        most = 1.5 * least.num_running + 4 if known.is_reply else least.num_running + 1
        if sticky.num_running > most:
            return least
        self.stats.num_sticky += known.is_reply
        return sticky

    async def _try(self, server: _Server, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        """One request on one server; ends with an answer, with the deadline, or when the server is known to be gone."""
        work = asyncio.create_task(server.dialect.generate(request, weights))
        server.num_running += 1
        server.num_served += 1
        try:
            limit_s, first = self.times.request_s, asyncio.FIRST_COMPLETED
            while not (await asyncio.wait({work, server.lost}, timeout=limit_s, return_when=first))[0]:
                if not server.replacing.locked():  # else its requests are paused, and have all their time afterwards
                    limit = f"{limit_s:g} s ({self.times.request_option})"
                    raise ServerLateError(f"{server.url} gave no answer within {limit}")
            if work.done():
                return work.result()
            raise ServerGoneError(f"{server.url} is gone: {server.why_out}")
        finally:
            server.num_running -= 1
            await _cancel_all([work])
            if self._is_resting:
                await self._tell()

    async def _look_after(self, server: _Server) -> None:
        while True:
            try:
                if server.is_ready:
                    await self._check_health(server)
                if not server.is_ready and not self._is_resting:
                    await self._admit(server)
            except Exception as error:  # noqa: BLE001 - nobody else looks after this server
                self._take_out(server, f"it cannot be used: {error!r}")
            server.is_tried.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wake.wait(), self.times.check_every_s)
            server.wake.clear()

    async def _check_health(self, server: _Server) -> None:
        is_well = False
        with contextlib.suppress(TimeoutError, TurnwiseError):
            async with asyncio.timeout(self.times.check_s):
                is_well = await server.dialect.healthy()
        server.num_missed = 0 if is_well else server.num_missed + 1
        if server.num_missed >= NUM_MISSED_CHECKS:
            self._take_out(server, f"{NUM_MISSED_CHECKS} health checks in a row had no answer")
            server.give_up_requests()
            return
        if not is_well or server.is_asleep or self._is_resting:
            return
        for weights in self._missing(server):
            with contextlib.suppress(ServiceError):  # `_load` has taken it out, or wrote down why not
                await self._load(server, weights)
        await self._unload(server)

    async def _admit(self, server: _Server) -> None:
        """Let a server take requests, if it is what the run needs, has all versions, and answers."""
        try:
            async with asyncio.timeout(self.times.first_s):
                facts = await server.dialect.facts()
            self._check_facts(server.url, facts)
            server.wrong = None
            if server.is_asleep:
                await self._wake(server)
            server.loaded.clear()  # it may be another process than before
            for weights in self._missing(server):
                await self._load(server, weights)
            await self._try_out(server)
        except (TimeoutError, ServiceError, ConfigError) as error:
            server.is_asleep &= not is_unreachable(error)
            server.wrong = error if isinstance(error, ConfigError) else None
            server.num_stuck = server.num_stuck + 1 if is_stuck(error) else 0
            server.why_out = str(error) or "it does not answer"
            server.give_up_requests()
            await self._start_again(server)
            return
        if self._missing(server):
            server.wake.set()  # something was published meanwhile: load it first
            return
        server.num_missed, server.num_stuck, server.is_ready = 0, 0, True
        self.stats.num_returned += server.was_ready
        server.was_ready = True
        await self._tell()

    async def _try_out(self, server: _Server) -> None:
        """Have a server draw with the newest version, and compare."""
        newest = list(self._live.values())[-1:] or [ServedWeights(version=0)]
        request = self._probe.request
        async with asyncio.timeout(self.times.first_s):
            answer = await server.dialect.generate(request, newest[0])
        check_answer(answer, request, server.url)
        await self._probe.check(server.url, answer.sequences[0])

    async def _start_again(self, server: _Server) -> None:
        if self._revive is None or server.wrong is not None:
            return
        try:
            if await self._revive(server.url, server.num_stuck >= NUM_STUCK):
                server.is_asleep, server.num_stuck = False, 0
        except TurnwiseError as error:
            server.why_out = str(error)

    def _take_out(self, server: _Server, why: str) -> None:
        """Send nothing to this server until it was checked."""
        server.why_out = why
        if server.is_ready:
            server.is_ready = False
            self.stats.num_lost += 1
            self._routes.forget_server(server.url)
            server.wake.set()

    def _missing(self, server: _Server) -> list[ServedWeights]:
        """What a server still has to load. Of whole weights only the newest: older ones would replace them again."""
        newest = list(self._live.values())[-1:]
        if newest and newest[0].is_whole:
            return [one for one in newest if not server.has(one)]
        return [one for one in self._live.values() if not server.has(one)]

    async def _load(self, server: _Server, weights: ServedWeights) -> None:
        assert weights.name is not None
        if weights.is_whole:
            await self._replace(server, weights)
        else:
            await self._bring(server, weights)
        if weights.name in self._live:
            server.loaded.add(weights.name)
            await self._tell()
        else:
            server.unwanted[weights.name] = weights  # nobody wanted it any more by the time it was there
            await self._unload(server)

    async def _replace(self, server: _Server, weights: ServedWeights) -> None:
        """Replace a server's whole weights, unless it has these or newer ones, or nobody wants them any more."""
        async with server.replacing:
            names = list(self._live)
            at = next((index for index, name in enumerate(names) if name == weights.name), len(names))
            if at == len(names) or server.loaded.intersection(names[at:]):
                return
            try:
                await self._bring(server, weights)
            except BaseException as error:
                # It may hold the old weights, the new ones, or some of each. Nobody asks it until they are loaded.
                self._take_out(server, str(error) or "its weights were being replaced")
                server.give_up_requests()  # what they draw from now on is of no version
                raise
            server.loaded.update(names[:at])  # they answer for older ones too: every token says which weights drew it

    async def _bring(self, server: _Server, weights: ServedWeights) -> None:
        """Load an adapter, or replace the whole weights; takes the server out where it does not answer."""
        try:
            async with asyncio.timeout(self.times.load_s):
                await bring_weights(server.dialect, weights)
        except TimeoutError as cause:
            gone = ServerGoneError(f"{server.url} did not load {weights.name} within {self.times.load_s:g} s")
            self._take_out(server, str(gone))
            raise gone from cause
        except ServerGoneError as error:
            self._take_out(server, str(error))
            raise
        except ServiceError as error:
            server.why_out = str(error)
            raise

    async def _unload(self, server: _Server) -> None:
        """Unload what nobody uses any more; what cannot be unloaded now is tried again after the next health check."""
        if server.is_asleep:
            return
        for name, weights in list(server.unwanted.items()):
            with contextlib.suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(self.times.check_s):
                    await server.dialect.unload(weights)
                server.unwanted.pop(name, None)

    async def _await_loads(self, loads: dict[asyncio.Task[None], _Server]) -> list[ServiceError]:
        """Wait for loads under way: for all, or a little longer than for the first. Returns what failed."""
        errors: list[ServiceError] = []
        waiting: set[asyncio.Task[None]] = set(loads)
        started_s, until_s = time.monotonic(), math.inf
        while waiting and time.monotonic() < until_s:
            left_s = None if until_s == math.inf else until_s - time.monotonic()
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    until_s = min(until_s, 2 * time.monotonic() - started_s + self.times.laggard_s)
                elif isinstance(error, ServiceError):
                    errors.append(error)
                else:
                    raise error
        return errors

    def _has_any(self, weights: ServedWeights) -> bool:
        return any(server.is_ready and server.has(weights) for server in self._servers)

    async def _until(self, is_so: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until a condition holds; False if it does not hold in time."""
        if is_so():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(is_so)
        return is_so()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _why_out(self) -> str:
        return "; ".join(f"{server.url}: {server.why_out}" for server in self._servers)


async def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End tasks, and wait a little for them to clean up."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CANCEL_GRACE_S)
