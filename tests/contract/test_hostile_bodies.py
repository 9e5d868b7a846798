"""One client sends 20 MB of garbage: it is refused soon, and nobody else waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from service_process import ServerProcess
from turnwise.service.wire.proto import message_class
from turnwise.service.wire.types import PROTOBUF

SIZE = 20_000_000
NUMBERS = [7] * (SIZE // 3)
WORDS = ["a"] * (SIZE // 5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("data") / "served")
    yield process
    process.stop()


@pytest.mark.model
def test_garbage_is_refused_while_others_are_answered(server: ServerProcess) -> None:
    proto = message_class("ForwardBackwardRequest")(model_id="m", seq_id=1, loss_fn="ppo").SerializeToString()
    datum = {"model_input": {"chunks": [{"tokens": WORDS}]}, "loss_fn_inputs": {}}
    training = {"model_id": "m", "seq_id": 1}
    for path, body in (
        ("/api/v1/forward_backward", {"forward_backward_input": {"data": NUMBERS, "loss_fn": "ppo"}, **training}),
        ("/api/v1/forward_backward", {"forward_backward_input": {"data": [datum], "loss_fn": "ppo"}, **training}),
        ("/v1/chat/completions", {"model": "tiny", "messages": NUMBERS}),
        ("/api/v1/create_session", {"tags": NUMBERS}),
        ("/api/v1/forward_backward", b"\xff" * SIZE),
        ("/api/v1/forward_backward", proto + b"\x1a\x00" * (SIZE // 2)),  # ten million empty datums
    ):
        status, took_s, waits_s = _attack(server, path, body)
        print(f"{path}: {status} after {took_s:.2f} s; {len(waits_s)} polls, slowest {max(waits_s, default=0):.3f} s")
        expected = {"/v1/chat/completions": 400, "/api/v1/create_session": 413}.get(path, 422)
        assert status == expected, "413 from the others would mean that the reading process died"
        assert took_s < 30
        assert max(waits_s, default=0.0) < max(1.0, took_s / 2), "others waited for most of it"


def _attack(server: ServerProcess, path: str, body: Any) -> tuple[int, float, list[float]]:
    """Status and seconds of one large request, and how long each poll of `healthz` took meanwhile."""
    is_proto = isinstance(body, bytes)
    content, kind = (body, PROTOBUF) if is_proto else (json.dumps(body).encode(), "application/json")
    waits_s: list[float] = []
    is_over = threading.Event()

    def poll() -> None:
        with httpx2.Client(base_url=server.url, timeout=60) as other:
            while not is_over.is_set():
                started_s = time.monotonic()
                other.get("/api/v1/healthz")
                waits_s.append(time.monotonic() - started_s)
                time.sleep(0.01)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            started_s = time.monotonic()
            answer = client.post(path, content=content, headers={"content-type": kind})
            took_s = time.monotonic() - started_s
    finally:
        is_over.set()
        poller.join()
    return answer.status_code, took_s, waits_s


@pytest.mark.model
def test_the_process_that_reads_large_bodies_lives_as_long_as_its_server(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "served")
    end_s = time.monotonic() + 60
    while not (readers := _children(server.pid)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert readers, "it starts with the server, before any large body"
    server.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in readers) and time.monotonic() < end_s + 60:
        time.sleep(0.05)
    assert not [pid for pid in readers if Path(f"/proc/{pid}").exists()], (
        "a server that was killed leaves nobody behind"
    )


def _children(pid: int) -> list[int]:
    """Processes that a process started from its main thread."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
