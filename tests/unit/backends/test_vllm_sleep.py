"""A vLLM server that gives its memory back: the routes, bodies and answers of vLLM 0.32, which sleeps on GPUs only."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from turnwise.backends.servers.http import ServerGoneError
from turnwise.backends.servers.vllm_dialect import VllmDialect, VllmUse
from turnwise.errors import ConfigError

ROUTES = ("/inference/v1/generate", "/v1/load_lora_adapter", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc")


class SleepyVllm(ThreadingHTTPServer):
    """What such a server keeps between requests; faults are attributes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), SleepyVllmRoutes)
        self.is_asleep = self.only_says_so = False
        self.routes: tuple[str, ...] = ROUTES
        self.sleep_mode = True
        self.asked: list[str] = []

    def answer(self, path: str, body: Any) -> Any:
        if path.startswith(("/sleep", "/wake_up")):
            self.asked.append(path)
            self.is_asleep = path.startswith("/sleep") and not self.only_says_so
            return (
                {"status": "sleeping", "level": 1} if path.startswith("/sleep") else {"status": "awake", "tags": None}
            )
        if path == "/inference/v1/generate":
            temperature = body["sampling_params"]["temperature"]
            best = [{"rank": rank, "logprob": -rank / temperature} for rank in range(1, 6)]
            content = [{"logprob": -1.0, "top_logprobs": best}]
            return {"choices": [{"index": 0, "logprobs": {"content": content}}]}
        config = {"device_config": {"device": "cuda"}, "model_config": {"enable_sleep_mode": self.sleep_mode}}
        return {
            "/openapi.json": {"paths": {key: {} for key in self.routes}},
            "/server_info?config_format=json": {"vllm_config": config},
            "/v1/models": {"data": [{"id": "m", "root": "/models/m", "parent": None, "max_model_len": 64}]},
            "/is_sleeping": {"is_sleeping": self.is_asleep},
        }[path]


class SleepyVllmRoutes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SleepyVllm

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length") or 0))
        said = json.dumps(self.server.answer(self.path, json.loads(text) if text else None)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[SleepyVllm]:
    with SleepyVllm() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_a_server_sleeps_and_wakes_and_one_that_only_says_so_is_found_out(server: SleepyVllm) -> None:
    dialect = VllmDialect(f"http://127.0.0.1:{server.server_port}", VllmUse(end_ids=(2,), sleeps=True))
    try:
        assert (await dialect.facts()).context_length == 64
        await dialect.sleep()
        assert server.is_asleep
        await dialect.wake()
        assert not server.is_asleep
        assert server.asked == ["/sleep?level=1&mode=wait", "/wake_up"], (
            "weights and adapters are kept in the host's memory"
        )
        server.only_says_so = True
        with pytest.raises(ServerGoneError, match="says that it sleeps"):
            await dialect.sleep()
        server.sleep_mode = False  # as on a CPU: it would say that it sleeps, and keep its memory
        with pytest.raises(ConfigError, match="cannot sleep; start it with --enable-sleep-mode, on a GPU"):
            await dialect.facts()
        server.routes = tuple(route for route in ROUTES if route != "/sleep")
        with pytest.raises(ConfigError, match="has no route /sleep; start the server with VLLM_SERVER_DEV_MODE=1 and"):
            await dialect.facts()
    finally:
        await dialect.close()
