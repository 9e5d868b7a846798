"""A fleet: who gets a request, and what happens when a server fails, hangs, lags behind or comes back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnwise.backends.servers.dialect import ServedWeights, ServerDialect, ServerFacts
from turnwise.backends.servers.fleet import Fleet
from turnwise.backends.servers.fleet_figures import FleetTimes
from turnwise.backends.servers.http import ServerGoneError, ServerRefusedError
from turnwise.backends.servers.probe import Probe
from turnwise.errors import ConfigError, ServiceError
from turnwise.types import SampledSequence, SampleRequest, SampleResponse, SamplingParams

TIMES = FleetTimes(request_s=0.4, wait_s=1.0, check_every_s=0.03, check_s=0.2, load_s=0.3, laggard_s=0.05)
PATIENT = FleetTimes(request_s=60, wait_s=5, check_every_s=0.03)
BASE = ServedWeights(version=0)


def version(number: int) -> ServedWeights:
    return ServedWeights(version=number, adapter=Path(f"/nowhere/turnwise-test-v{number}"))


class ServerInMemory(ServerDialect):
    """A server whose faults are attributes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_dead = self.is_hung = self.is_slow_to_load = self.dies_of_scoring = self.says_nonsense = False
        self.vocabulary = 100
        self.facts_s = 0.0
        """How long it takes to say what it serves."""
        self.logprob = -1.0
        self.refuses_load = False
        self.adapters: set[str] = set()
        self.asked: list[tuple[int, ...]] = []
        self.num_answered = self.num_cancelled = 0
        self.draw_s = 0.0
        self.says_something_new = False
        self.gate: asyncio.Event | None = None
        """Replies wait for it."""
        self.gate_of_weights: asyncio.Event | None = None
        """Whole weights wait for it."""
        self.whole = ""
        """The whole weights that it holds."""
        self.replaced: list[str] = []
        self.is_asleep = self.never_wakes = False
        self.num_running = 0

    def restart(self) -> None:
        """As another process: nothing is loaded any more, and it is awake."""
        self.adapters.clear()
        self.is_dead = self.is_asleep = False

    def _check_alive(self) -> None:
        if self.is_dead:
            raise ServerGoneError(f"{self.url}: connection refused", is_unreachable=True)

    async def sleep(self) -> None:
        self._check_alive()
        assert not self.num_running, "it sleeps when its requests are done"
        self.is_asleep = True

    async def wake(self) -> None:
        self._check_alive()
        assert self.is_asleep, "SGLang ends when it is woken twice"
        await asyncio.sleep(60 if self.never_wakes else 0)
        self.is_asleep = False

    async def facts(self) -> ServerFacts:
        self._check_alive()
        if self.says_nonsense:
            raise KeyError("logprobs")
        await asyncio.sleep(self.facts_s)
        return ServerFacts(model="m", vocabulary=self.vocabulary)

    async def healthy(self) -> bool:
        return not self.is_dead

    async def generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        self._check_alive()
        if weights.adapter_name is not None and weights.adapter_name not in self.adapters:
            raise ServerGoneError(f"{self.url} has no adapter {weights.name}")
        assert not self.is_asleep, "a server that sleeps is not asked"
        self.asked.append(tuple(request.prompt))
        self.is_dead |= self.dies_of_scoring and request.include_prompt_logprobs
        self.num_running += 1
        try:
            await asyncio.sleep(60 if self.is_hung else self.draw_s)
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        self._check_alive()
        self.num_answered += 1
        tokens = [7, random.randrange(10**6)] if self.says_something_new else [7, 8]
        return SampleResponse([SampledSequence("stop", tokens, [self.logprob, self.logprob])] * request.num_samples)

    async def load(self, weights: ServedWeights) -> None:
        self._check_alive()
        if self.refuses_load:
            raise ServerRefusedError("the rank is too large", 400)
        assert not self.is_asleep, "a server that sleeps loads nothing"
        await asyncio.sleep(60 if self.is_slow_to_load else 0)
        assert weights.name is not None
        self.adapters.add(weights.name)

    async def unload(self, weights: ServedWeights) -> None:
        self._check_alive()
        assert not self.is_asleep
        assert weights.name is not None
        self.adapters.discard(weights.name)

    async def replace_weights(self, files: Sequence[Path], version: int) -> None:  # noqa: ARG002
        self._check_alive()
        (name,) = {file.parent.name for file in files}
        self.replaced.append(name)
        self.whole = "half of each"
        if self.gate_of_weights is not None:
            await self.gate_of_weights.wait()
        await asyncio.sleep(60 if self.is_slow_to_load else 0)
        self.whole = name

    async def receive_weights(self, shared: Any, version: int) -> None:
        self._check_alive()
        self.whole = f"{shared} of version {version}"

    async def close(self) -> None:
        pass


@asynccontextmanager
async def running(
    servers: Sequence[ServerInMemory], times: FleetTimes = TIMES, probe: Probe | None = None
) -> AsyncIterator[Fleet]:
    fleet = Fleet(servers, times=times, check_facts=check_vocabulary, probe=probe)
    try:
        await fleet.start()
        for server in servers:
            server.asked.clear()
        yield fleet
    finally:
        await fleet.close()


def check_vocabulary(url: str, facts: ServerFacts) -> None:
    if facts.vocabulary != 100:
        raise ConfigError(f"{url} serves another model")


def make_servers(count: int) -> list[ServerInMemory]:
    return [ServerInMemory(f"http://s{index}") for index in range(count)]


def prompt(*tokens: int) -> SampleRequest:
    return SampleRequest(tokens, SamplingParams(max_tokens=4))


async def until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.005)


async def test_turns_of_a_conversation_go_to_one_server_and_new_conversations_to_the_least_loaded() -> None:
    servers = make_servers(3)
    turn_ends = asyncio.Event()
    turn_ends.set()
    for server in servers:
        server.gate, server.says_something_new = turn_ends, True
    dialogues = [[5, 5, 5] for _ in range(30)]  # all begin alike, as attempts of a group do
    homes: list[set[str]] = [set() for _ in dialogues]

    async with running(servers, PATIENT) as fleet:
        for turn in range(6):
            turn_ends.clear()
            asked = [asyncio.create_task(fleet.generate(prompt(*tokens), BASE)) for tokens in dialogues]
            await until(lambda: sum(len(server.asked) for server in servers) == len(dialogues))
            shares = sorted(len(server.asked) for server in servers)
            assert shares[0] >= 9, f"turn {turn}: {shares} of 30 requests that run at the same time"
            turn_ends.set()
            for number, answer in enumerate(await asyncio.gather(*asked)):
                if turn:
                    homes[number] |= {one.url for one in servers if tuple(dialogues[number]) in one.asked}
                dialogues[number] += [*answer.sequences[0].tokens, 1000 + number, turn]
            for server in servers:
                server.asked.clear()
        assert fleet.stats.num_sticky == 150, "every turn that follows an earlier one"
    assert all(len(urls) == 1 for urls in homes)


async def test_a_conversation_leaves_a_server_that_has_far_more_to_do_than_another() -> None:
    servers = make_servers(2)
    turn_ends = asyncio.Event()
    turn_ends.set()
    for server in servers:
        server.gate = turn_ends
    async with running(servers, PATIENT) as fleet:
        first = await fleet.generate(prompt(9, 9), BASE)
        (home,) = [server for server in servers if server.asked]
        (other,) = [server for server in servers if server is not home]
        longer = (9, 9, *first.sequences[0].tokens, 3)
        turn_ends.clear()
        branches = [asyncio.create_task(fleet.generate(prompt(*longer, number), BASE)) for number in range(12)]
        await until(lambda: len(home.asked) + len(other.asked) == 13)
        assert (len(home.asked) - 1, len(other.asked)) == (9, 3), "home takes half as many again, and 4"
        assert fleet.stats.num_sticky == 9
        turn_ends.set()
        await asyncio.gather(*branches)


async def test_a_dead_server_loses_its_requests_to_another_and_returns_with_every_version_loaded() -> None:
    servers = make_servers(3)
    for server in servers:
        server.draw_s = 0.1
    async with running(servers) as fleet:
        await fleet.publish(version(1))
        under_way = [asyncio.create_task(fleet.generate(prompt(number), version(1))) for number in range(9)]
        await asyncio.sleep(0.02)
        servers[0].is_dead = True
        answers = await asyncio.gather(*under_way)
        assert all(answer.sequences[0].tokens == [7, 8] for answer in answers)
        assert fleet.stats.num_retries == 3
        assert fleet.num_ready == 2
        await fleet.publish(version(2))
        servers[0].restart()
        await until(lambda: fleet.num_ready == 3)
        assert servers[0].adapters == {"turnwise-test-v1", "turnwise-test-v2"}
        assert fleet.stats.num_returned == 1


async def test_a_server_that_accepts_and_never_answers_is_left_at_the_deadline_and_stays_out() -> None:
    servers = make_servers(2)
    async with running(servers) as fleet:
        servers[0].is_hung = True
        answers = await asyncio.gather(*(fleet.generate(prompt(number), BASE) for number in range(4)))
        assert len(answers) == 4
        assert servers[0].num_cancelled >= 2, "what hangs is ended there"
        await asyncio.sleep(0.1)
        assert fleet.num_ready == 1, "it is healthy by its own word, and fails the probe"
        servers[0].is_hung = False
        await until(lambda: fleet.num_ready == 2)


class Slow(ServerInMemory):
    """Draws one token in time, and no long reply."""

    async def generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        self.draw_s = 60.0 if request.sampling_params.max_tokens != 1 else 0.0
        return await super().generate(request, weights)


async def test_a_reply_that_is_too_long_for_the_deadline_fails_with_the_option_that_sets_it() -> None:
    async with running([Slow(f"http://s{index}") for index in range(4)]) as fleet:
        with pytest.raises(ServiceError, match=r"2 servers failed.*within 0\.4 s \(rollout\.server_deadline_s\)"):
            await fleet.generate(prompt(1), BASE)


async def test_a_version_counts_as_published_without_a_server_that_lags_which_is_not_asked_for_it() -> None:
    servers = make_servers(2)
    async with running(servers) as fleet:
        servers[1].is_slow_to_load = True
        await fleet.publish(version(1))
        assert fleet.stats.num_fenced == 1
        await asyncio.gather(*(fleet.generate(prompt(number), version(1)) for number in range(6)))
        assert len(servers[0].asked) == 6
        assert not servers[1].asked
        await asyncio.gather(*(fleet.generate(prompt(number), BASE) for number in range(50, 56)))
        servers[1].is_slow_to_load = False
        await until(lambda: servers[1].adapters == {"turnwise-test-v1"} and fleet.num_ready == 2)
        await asyncio.gather(*(fleet.generate(prompt(number), version(1)) for number in range(100, 106)))
        assert len([tokens for tokens in servers[1].asked if tokens[0] >= 100]) == 3


async def test_a_publication_waits_for_the_only_server_when_it_hangs_and_comes_back() -> None:
    (server,) = servers = make_servers(1)
    async with running(servers) as fleet:
        server.is_slow_to_load = True
        publishing = asyncio.create_task(fleet.publish(version(1)))
        await until(lambda: not fleet.num_ready)
        assert not publishing.done()
        server.is_slow_to_load = False
        await publishing
        assert server.adapters == {version(1).name}
        assert (await fleet.generate(prompt(1), version(1))).sequences
        server.is_slow_to_load = True
        with pytest.raises(ServiceError, match=r"version 2 reached no server: http://s0: http://s0 did not load"):
            await fleet.publish(version(2))


async def test_a_request_waits_for_a_server_and_then_fails_with_what_each_server_said() -> None:
    servers = make_servers(2)
    async with running(servers) as fleet:
        for server in servers:
            server.is_dead = True
        waiting = asyncio.create_task(fleet.generate(prompt(1), BASE))
        await asyncio.sleep(0.3)
        servers[1].restart()
        assert (await waiting).sequences[0].tokens == [7, 8], "it came back in time"
        servers[1].is_dead = True
        with pytest.raises(ServiceError, match=r"no server could sample for 1 s: http://s0: .*refused; http://s1: "):
            await fleet.generate(prompt(2), BASE)


async def test_a_publication_that_every_server_refuses_fails_at_once_with_their_words() -> None:
    servers = make_servers(2)
    async with running(servers) as fleet:
        for server in servers:
            server.refuses_load = True
        started_s = time.monotonic()
        with pytest.raises(ServiceError, match="version 1 cannot be published: the rank is too large"):
            await fleet.publish(version(1))
        assert time.monotonic() - started_s < TIMES.wait_s
        assert fleet.num_ready == 2


async def test_a_wrong_model_is_refused_at_the_start_and_a_server_that_returns_with_one_stays_out() -> None:
    servers = make_servers(2)
    servers[1].vocabulary = 99
    with pytest.raises(ConfigError, match="http://s1 serves another model"):
        async with running(servers):
            pass
    servers[1].vocabulary = 100
    async with running(servers) as fleet:
        servers[1].is_dead = True
        await until(lambda: fleet.num_ready == 1)
        servers[1].vocabulary = 99
        servers[1].restart()
        await asyncio.sleep(0.2)
        assert fleet.num_ready == 1


class SameModel(Probe):
    """Knows the run's model by its logprobs."""

    async def check(self, url: str, drawn: SampledSequence) -> None:
        if list(drawn.logprobs or ()) != [-1.0, -1.0]:
            raise ConfigError(f"{url} draws as another model does")


async def test_what_a_server_draws_is_compared_whenever_it_comes_back_or_joins_late() -> None:
    first, second, late = servers = make_servers(3)
    late.is_dead, late.logprob = True, -2.0
    async with running(servers, probe=SameModel()) as fleet:
        await fleet.publish(version(1))
        second.is_dead = True
        await until(lambda: fleet.num_ready == 1)
        second.logprob = -2.0
        second.restart()
        late.restart()
        await asyncio.sleep(0.2)
        assert fleet.num_ready == 1
        await asyncio.gather(*(fleet.generate(prompt(number), version(1)) for number in range(4)))
        assert len(first.asked) == 4, "nobody else is asked for the run"
        second.logprob = late.logprob = -1.0
        await until(lambda: fleet.num_ready == 3)


async def test_a_server_that_says_it_is_well_and_never_draws_is_started_again_where_it_is_ours() -> None:
    (server,) = servers = make_servers(1)
    asked: list[bool] = []

    async def revive(url: str, is_stuck: bool) -> bool:
        assert url == server.url
        asked.append(is_stuck)
        server.is_hung &= not is_stuck
        return is_stuck

    fleet = Fleet(servers, times=replace(TIMES, wait_s=30.0), revive=revive)
    try:
        await fleet.start()
        server.is_hung = True
        answer = await fleet.generate(prompt(1), BASE)
        assert answer.sequences[0].tokens == [7, 8], "the request waits for it"
        assert asked == [False, False, True], "it gets some tries before it is ended"
    finally:
        await fleet.close()


async def test_logprobs_that_are_none_are_refused_and_the_request_goes_elsewhere() -> None:
    servers = make_servers(2)
    async with running(servers) as fleet:
        servers[0].logprob = float("nan")
        for number in range(4):
            answer = await fleet.generate(prompt(number), BASE)
            assert answer.sequences[0].logprobs == [-1.0, -1.0]
        assert fleet.stats.num_retries == 1, "the probe finds it too, so it is not asked again"


async def test_a_cancelled_request_ends_on_the_server_and_counts_no_more() -> None:
    servers = make_servers(1)
    async with running(servers, PATIENT) as fleet:
        servers[0].is_hung = True
        task = asyncio.create_task(fleet.generate(prompt(1), BASE))
        await until(lambda: bool(servers[0].asked))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert servers[0].num_cancelled == 1
        assert fleet.num_ready == 1, "nobody is to blame"


async def test_a_prompt_that_ends_servers_when_it_is_scored_does_not_end_the_whole_fleet() -> None:
    servers = make_servers(3)
    for server in servers:
        server.dies_of_scoring = True
    async with running(servers, PATIENT) as fleet:
        with pytest.raises(ServiceError, match="2 servers failed this request"):
            await fleet.generate(SampleRequest.scoring((1, 2, 3)), BASE)
        assert sorted(server.is_dead for server in servers) == [False, True, True]
        assert (await fleet.generate(prompt(1), BASE)).sequences[0].tokens == [7, 8]


async def test_a_server_whose_words_make_no_sense_is_asked_again_and_comes_back() -> None:
    servers = make_servers(2)
    servers[1].says_nonsense = True
    async with running(servers) as fleet:
        assert fleet.num_ready == 1
        servers[1].says_nonsense = False
        await until(lambda: fleet.num_ready == 2)
    servers[0].says_nonsense = servers[1].says_nonsense = True
    with pytest.raises(ServiceError, match="http://s0: it cannot be used: KeyError"):
        async with running(servers):
            pass


async def test_a_retired_version_is_unloaded_everywhere() -> None:
    servers = make_servers(2)
    async with running(servers) as fleet:
        for number in (1, 2):
            await fleet.publish(version(number))
        await fleet.retire(version(1))
        assert all(server.adapters == {"turnwise-test-v2"} for server in servers)


def whole(directory: Path, number: int) -> ServedWeights:
    place = directory / f"turnwise-test-v{number}"
    place.mkdir()
    (place / "model.safetensors").touch()
    return ServedWeights(version=number, adapter=place, is_whole=True)


async def test_a_server_that_missed_whole_weights_gets_the_newest_and_never_goes_back_to_older_ones(
    tmp_path: Path,
) -> None:
    servers = make_servers(2)
    first, second, third = (whole(tmp_path, number) for number in (1, 2, 3))
    async with running(servers) as fleet:
        await fleet.publish(first)
        servers[1].is_slow_to_load = True
        await fleet.publish(second)
        assert fleet.stats.num_fenced == 1
        assert servers[1].whole == "half of each"
        await asyncio.gather(*(fleet.generate(prompt(number), first) for number in range(6)))
        assert not servers[1].asked, "what was being replaced answers nobody, for no version"
        servers[1].is_slow_to_load = False
        await until(lambda: fleet.num_ready == 2)
        await fleet.publish(third)
        await asyncio.sleep(4 * TIMES.check_every_s)
        assert [server.whole for server in servers] == ["turnwise-test-v3"] * 2
        assert "turnwise-test-v1" not in servers[1].replaced[1:], "older weights are not loaded again"
        for server in servers:
            server.asked.clear()
        await asyncio.gather(*(fleet.generate(prompt(number), first) for number in range(20, 26)))
        assert [len(server.asked) for server in servers] == [3, 3], "the newest answer for older ones too"


async def test_a_server_that_comes_back_reads_the_newest_weights_in_the_trainers_memory_again() -> None:
    (server,) = servers = make_servers(1)
    memory: Any = "memory"
    async with running(servers, PATIENT) as fleet:
        for number in (1, 2):
            await fleet.publish(replace(version(number), is_whole=True, shared=memory))
        assert server.whole == "memory of version 2"
        server.is_dead = True
        await until(lambda: fleet.num_ready == 0)
        server.whole = ""
        server.restart()
        await until(lambda: fleet.num_ready == 1)
        assert server.whole == "memory of version 2"


async def test_servers_sleep_when_their_requests_are_done_and_wake_for_the_next_with_all_versions() -> None:
    servers = make_servers(2)
    async with running(servers, PATIENT) as fleet:
        await fleet.publish(version(1))
        gate = asyncio.Event()
        for server in servers:
            server.gate = gate
        under_way = [asyncio.create_task(fleet.generate(prompt(5, number), version(1))) for number in range(4)]
        await asyncio.sleep(0.02)
        resting = asyncio.create_task(fleet.rest())
        await asyncio.sleep(0.05)
        assert not resting.done()
        assert not any(server.is_asleep for server in servers), "replies under way are drawn to their end"
        gate.set()
        await asyncio.gather(*under_way)
        await resting
        assert all(server.is_asleep for server in servers)
        await fleet.retire(version(1))
        await asyncio.sleep(0.1)  # health checks go on
        assert all(server.is_asleep and server.adapters for server in servers), "nothing is done on a sleeping server"
        await fleet.publish(version(2))
        assert [server.adapters for server in servers] == [{version(2).name}] * 2, "and then all of it"
        await fleet.rest()
        await asyncio.gather(*(fleet.generate(prompt(5, number), version(2)) for number in range(4)))
        assert not any(server.is_asleep for server in servers)


async def test_a_server_that_never_wakes_or_dies_asleep_is_left_out_and_comes_back_when_it_is_well() -> None:
    first, second = make_servers(2)
    async with running([first, second]) as fleet:
        await fleet.publish(version(1))
        await fleet.rest()
        first.never_wakes = True
        await fleet.generate(prompt(5, 1), version(1))
        assert (fleet.num_ready, second.num_answered, fleet.stats.num_lost) == (1, 2, 1)
        first.never_wakes = False
        await until(lambda: fleet.num_ready == 2)
        await fleet.rest()
        first.is_dead = True
        await fleet.generate(prompt(5, 2), version(1))
        assert fleet.num_ready == 1
        first.restart()
        await until(lambda: fleet.num_ready == 2)
        assert version(1).name in first.adapters
        await fleet.rest()
        first.is_dead = second.never_wakes = True
        with pytest.raises(ServiceError, match=r"no server could sample.*connection refused.*did not wake up"):
            await fleet.generate(prompt(5, 3), version(1))


async def test_what_a_server_should_have_unloaded_while_it_was_down_is_unloaded_when_it_is_back() -> None:
    first, second = make_servers(2)
    async with running([first, second]) as fleet:
        await fleet.publish(version(1))
        first.is_dead = True
        await until(lambda: fleet.num_ready == 1)
        await fleet.retire(version(1))
        assert (first.adapters, second.adapters) == ({version(1).name}, set())
        first.is_dead = False  # it hung, and lost nothing
        await until(lambda: not first.adapters)


async def test_replies_wait_while_weights_are_replaced_and_have_all_their_time_afterwards(tmp_path: Path) -> None:
    (server,) = servers = make_servers(1)
    first, second = (whole(tmp_path, number) for number in (1, 2))
    async with running(servers, replace(TIMES, load_s=5.0)) as fleet:
        await fleet.publish(first)
        gate = server.gate = server.gate_of_weights = asyncio.Event()
        publishing = asyncio.create_task(fleet.publish(second))
        await until(lambda: server.whole == "half of each")
        waiting = asyncio.create_task(fleet.generate(prompt(1), first))
        await asyncio.sleep(2 * TIMES.request_s)
        gate.set()
        await publishing
        assert (await waiting).sequences[0].tokens == [7, 8]
        assert (fleet.stats.num_lost, fleet.stats.num_retries) == (0, 0), "nobody is to blame"


async def test_a_server_that_is_slow_at_first_is_let_in_and_not_started_again() -> None:
    (server,) = servers = make_servers(1)
    server.facts_s = 2 * TIMES.check_s
    asked: list[bool] = []

    async def revive(_url: str, is_stuck: bool) -> bool:
        asked.append(is_stuck)
        return False

    fleet = Fleet(servers, times=replace(TIMES, request_s=16 * TIMES.check_s, wait_s=30.0), revive=revive)
    try:
        await fleet.start()
        assert (fleet.num_ready, asked) == (1, [])
    finally:
        await fleet.close()
