"""EngineWorker against an engine that only counts: who runs when, who fails, and that nobody ever hangs."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from turnwise.engine.worker import EngineWorker
from turnwise.errors import DataError, EngineStoppedError
from turnwise.types import SampledSequence, SampleRequest, SampleResponse, SamplingParams

DEADLINE_S = 120.0
Begin = Callable[[Any], Generator[None, None, Any]]


class CountingSampler:
    """Every step gives every request one token; a request is done after `max_tokens`."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.requests: dict[int, dict[str, Any]] = {}
        self.cancelled: list[int] = []
        self.step_error: BaseException | None = None
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, asked: SampleRequest, _policy: object, *, on_done: Callable[..., None], **_: object) -> int:
        if not asked.prompt:
            raise DataError("the prompt is empty")
        request_id = next(self._ids)
        left = asked.sampling_params.max_tokens
        self.requests[request_id] = {"prompt": asked.prompt, "left": left, "on_done": on_done}
        return request_id

    def step(self) -> None:
        if self.step_error is not None:
            raise self.step_error
        self.log.append("sample")
        for request_id, request in list(self.requests.items()):
            request["left"] -= 1
            if request["left"] == 0:
                del self.requests[request_id]
                prompt_logprobs = [None, *[-1.0] * (len(request["prompt"]) - 1)]
                request["on_done"](SampleResponse([SampledSequence("stop", [1], [-1.0])], prompt_logprobs))

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.requests.pop(request_id, None)


class CountingEngine:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.sampler = CountingSampler(self.log)
        self.is_closed = False

    def sample_step(self) -> None:
        self.sampler.step()

    def wait(self) -> None:
        """A device that is always done."""

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def worker(engine: CountingEngine) -> Iterator[EngineWorker]:
    worker = EngineWorker(lambda: cast(Any, engine), name="counting")
    yield worker
    worker.close(DEADLINE_S)


def steps(name: str, count: int, *, seconds: float = 0.0) -> Begin:
    """An operation of `count` micro-batches that returns its name."""

    def begin(engine: CountingEngine) -> Generator[None, None, str]:
        for index in range(count):
            engine.log.append(f"{name}{index}")
            time.sleep(seconds)
            yield
        return name

    return begin


def blocked(started: threading.Event, release: threading.Event) -> Begin:
    def begin(_engine: object) -> Generator[None, None, None]:
        started.set()
        assert release.wait(DEADLINE_S)
        yield

    return begin


def sample(worker: EngineWorker, prompt: list[int], max_tokens: int) -> Future[SampleResponse]:
    return worker.sample(SampleRequest(prompt, SamplingParams(max_tokens=max_tokens)), cast(Any, None))


def hold(worker: EngineWorker) -> Callable[[], None]:
    """Keep the thread busy until the returned function is called, so that what is posted meanwhile is queued."""
    started, release = threading.Event(), threading.Event()
    worker.run_steps("holder", blocked(started, release))
    assert started.wait(DEADLINE_S)
    return release.set


def test_operations_of_one_client_keep_their_order(worker: EngineWorker, engine: CountingEngine) -> None:
    futures = [worker.run_steps("a", steps(f"op{i}-", 2)) for i in range(5)]
    assert [future.result(DEADLINE_S) for future in futures] == [f"op{i}-" for i in range(5)]
    assert engine.log == [f"op{i}-{j}" for i in range(5) for j in range(2)]


def test_clients_take_turns(worker: EngineWorker, engine: CountingEngine) -> None:
    release = hold(worker)
    futures = [worker.run_steps(client, steps(f"{client}{i}-", 1)) for client in "ab" for i in range(3)]
    release()
    for future in futures:
        future.result(DEADLINE_S)
    assert engine.log == ["a0-0", "b0-0", "a1-0", "b1-0", "a2-0", "b2-0"]


def test_sampling_finishes_while_a_long_operation_runs(worker: EngineWorker, engine: CountingEngine) -> None:
    training = worker.run_steps("a", steps("t", 2000, seconds=0.001))
    for _ in range(3):
        sample(worker, [1], max_tokens=5).result(DEADLINE_S)
    assert not training.done()
    assert training.cancel() is False
    assert engine.log.count("sample") == 15


def test_training_advances_while_the_sampler_is_never_idle(worker: EngineWorker, engine: CountingEngine) -> None:
    endless = sample(worker, [1], max_tokens=10**9)
    assert worker.run_steps("a", steps("t", 20)).result(DEADLINE_S) == "t"
    assert "sample" in engine.log[engine.log.index("t0") : engine.log.index("t19")]
    assert not endless.done()


def test_the_sampler_gets_as_long_as_the_micro_batch_took(
    worker: EngineWorker, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("turnwise.engine.worker.time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def slow(engine: Any) -> Generator[None, None, None]:
        for index in range(3):
            engine.log.append(f"t{index}")
            clock.now_s += 20.0
            yield

    count_step = engine.sampler.step

    def step() -> None:
        clock.now_s += 5.0
        count_step()

    engine.sampler.step = step
    release = hold(worker)
    training, endless = worker.run_steps("a", slow), sample(worker, [1], max_tokens=10**9)
    release()
    training.result(DEADLINE_S)
    endless.cancel()
    assert engine.log[engine.log.index("t0") : engine.log.index("t2") + 1] == [
        *["t0", *["sample"] * 4],
        *["t1", *["sample"] * 4],
        "t2",
    ]


def test_an_operation_that_raises_fails_alone(worker: EngineWorker) -> None:
    def bad(_engine: object) -> Generator[None, None, None]:
        yield
        raise DataError("a datum of it is wrong")

    release = hold(worker)
    before, failing = worker.run_steps("a", steps("x", 1)), worker.run_steps("a", bad)
    after, other = worker.run("a", lambda _engine: 7), worker.run_steps("b", steps("y", 1))
    release()
    with pytest.raises(DataError, match="a datum of it is wrong"):
        failing.result(DEADLINE_S)
    assert (before.result(DEADLINE_S), after.result(DEADLINE_S), other.result(DEADLINE_S)) == ("x", 7, "y")


def test_a_failed_operation_keeps_none_of_its_tensors_alive(worker: EngineWorker) -> None:
    class Activations:
        pass

    seen: list[weakref.ref[Activations]] = []

    def bad(_engine: object) -> Generator[None, None, None]:
        activations = Activations()
        seen.append(weakref.ref(activations))
        yield
        raise MemoryError("out of memory")

    future = worker.run_steps("a", bad)
    with pytest.raises(MemoryError):
        future.result(DEADLINE_S)
    worker.run("a", lambda _engine: None).result(DEADLINE_S)
    gc.collect()
    assert seen[0]() is None


def test_a_bad_sampling_request_fails_alone(worker: EngineWorker) -> None:
    good, bad = sample(worker, [1], max_tokens=3), sample(worker, [], max_tokens=3)
    with pytest.raises(DataError, match="the prompt is empty"):
        bad.result(DEADLINE_S)
    assert good.result(DEADLINE_S).sequences[0].tokens == [1]


def test_compute_logprobs_gives_one_per_prompt_token(worker: EngineWorker) -> None:
    assert worker.compute_logprobs([5, 6, 7], cast(Any, None)).result(DEADLINE_S) == [None, -1.0, -1.0]


def test_cancelling_a_sample_stops_it_and_frees_the_sampler(worker: EngineWorker, engine: CountingEngine) -> None:
    endless = sample(worker, [1], max_tokens=10**9)
    sample(worker, [1], max_tokens=2).result(DEADLINE_S)
    assert endless.cancel()
    worker.run("a", lambda _engine: None).result(DEADLINE_S)
    assert engine.sampler.cancelled == [0]
    assert not engine.sampler.has_work
    with pytest.raises(CancelledError):
        endless.result(DEADLINE_S)


def test_a_sample_cancelled_before_it_is_admitted_never_reaches_the_sampler(
    worker: EngineWorker, engine: CountingEngine
) -> None:
    release = hold(worker)
    queued = sample(worker, [1], max_tokens=1)
    assert queued.cancel()
    release()
    worker.run("a", lambda _engine: None).result(DEADLINE_S)
    assert "sample" not in engine.log


def test_a_cancelled_operation_is_skipped(worker: EngineWorker, engine: CountingEngine) -> None:
    release = hold(worker)
    dropped, kept = worker.run_steps("a", steps("dropped", 1)), worker.run_steps("a", steps("kept", 1))
    assert dropped.cancel()
    release()
    assert kept.result(DEADLINE_S) == "kept"
    assert engine.log == ["kept0"]


def test_close_fails_everything_that_waits(worker: EngineWorker, engine: CountingEngine) -> None:
    cut_short: list[str] = []

    def endless(_engine: object) -> Generator[None, None, None]:
        try:
            while True:
                yield
        except GeneratorExit:
            cut_short.append("closed")
            raise

    running, queued = worker.run_steps("a", endless), worker.run("a", lambda _engine: 1)
    sampling = sample(worker, [1], max_tokens=10**9)
    worker.close(DEADLINE_S)
    later = worker.run("a", lambda _engine: 1)
    for future in (running, queued, sampling, later, sample(worker, [1], max_tokens=1)):
        with pytest.raises(EngineStoppedError, match="was closed"):
            future.result(DEADLINE_S)
    assert engine.is_closed
    assert cut_short == ["closed"]
    assert worker.is_stopped
    worker.close(DEADLINE_S)  # a second time is fine


def test_death_of_the_worker_reaches_everybody_with_its_cause(worker: EngineWorker, engine: CountingEngine) -> None:
    release = hold(worker)
    engine.sampler.step_error = RuntimeError("the device is gone")
    futures = [sample(worker, [1], max_tokens=5), worker.run_steps("a", steps("t", 10**9))]
    release()
    for future in futures:
        with pytest.raises(EngineStoppedError, match="the device is gone") as raised:
            future.result(DEADLINE_S)
        assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(EngineStoppedError, match="the device is gone"):
        worker.run("a", lambda _engine: 1).result(DEADLINE_S)
    give_up_s = time.monotonic() + DEADLINE_S
    while not engine.is_closed and time.monotonic() < give_up_s:  # it is closed after everybody has heard
        time.sleep(0.001)
    assert engine.is_closed


def test_requests_that_race_with_close_are_all_settled(worker: EngineWorker) -> None:
    futures: list[Future[int]] = []
    started = threading.Event()

    def post() -> None:
        for _ in range(2000):
            futures.append(worker.run("a", lambda _engine: 1))
            started.set()

    threads = [threading.Thread(target=post) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(DEADLINE_S)
    worker.close(DEADLINE_S)
    for thread in threads:
        thread.join(DEADLINE_S)
    outcomes = {type(future.exception(DEADLINE_S)) for future in futures}
    assert len(futures) == 6000
    assert outcomes <= {type(None), EngineStoppedError}


def test_an_engine_that_cannot_load_raises_from_the_constructor() -> None:
    def load() -> Any:
        raise DataError("no such file")

    with pytest.raises(DataError, match="no such file"):
        EngineWorker(load, name="broken")


def test_waiting_on_the_engines_own_thread_is_refused(worker: EngineWorker) -> None:
    with pytest.raises(RuntimeError, match="waits for another request to the same engine"):
        worker.run("a", lambda _engine: sample(worker, [1], max_tokens=1).result()).result(DEADLINE_S)


def test_an_idle_worker_burns_no_time(worker: EngineWorker) -> None:
    worker.run("a", lambda _engine: None).result(DEADLINE_S)
    before = worker.run("a", lambda _engine: time.thread_time()).result(DEADLINE_S)
    time.sleep(0.3)
    after = worker.run("a", lambda _engine: time.thread_time()).result(DEADLINE_S)
    assert after - before < 0.05


def test_the_worker_loads_and_runs_the_engine_on_one_thread() -> None:
    threads: list[int] = []

    def load() -> Any:
        threads.append(threading.get_ident())
        return SimpleNamespace(sampler=CountingSampler([]), close=lambda: threads.append(threading.get_ident()))

    worker = EngineWorker(load, name="threads")
    worker.run("a", lambda _engine: threads.append(threading.get_ident())).result(DEADLINE_S)
    worker.close(DEADLINE_S)
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
