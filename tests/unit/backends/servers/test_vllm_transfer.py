"""Weights out of the trainer's memory: what a vLLM is asked, in which order, and what its refusal means."""

from __future__ import annotations

import base64
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.backends.servers.http import ServerGoneError, ServerRefusedError
from turnwise.backends.servers.vllm_calls import VllmHttp
from turnwise.backends.servers.vllm_dialect import VllmDialect, VllmUse
from turnwise.backends.servers.vllm_transfer import init_ipc, to_update_info
from turnwise.errors import ConfigError, ServiceError

CHUNK: Any = SimpleNamespace(
    names=("model.embed_tokens.weight", "lm_head.weight"),
    dtypes=("bfloat16", "bfloat16"),
    shapes=((4, 2), (4, 2)),
    sizes=(16, 16),
    handles={"GPU-1": ("args", 7)},
)


class TalkativeVllm(VllmHttp):
    """Writes down what it is asked, and fails where it is told to."""

    def __init__(self, fails_at: str = "", error: ServiceError | None = None, *, healthy: bool = True) -> None:
        super().__init__("http://127.0.0.1:1")
        self.asked: list[str] = []
        self._healthy = healthy
        self._fails_at = fails_at
        self._error = error or ServerGoneError("status 500: it broke", 500)

    async def _say(self, what: str) -> None:
        self.asked.append(what)
        if what == self._fails_at:
            raise self._error

    async def is_healthy(self) -> bool:
        return self._healthy

    async def init_transfer(self, settings: Mapping[str, Any]) -> None:
        assert settings == {"packed": True}
        await self._say("init")

    async def start_update(self) -> None:
        await self._say("start")

    async def update(self, part: Mapping[str, Any]) -> None:
        await self._say(f"update {part['names'][0]}")

    async def finish_update(self) -> None:
        await self._say("finish")

    async def pause(self, mode: str) -> None:
        await self._say(f"pause {mode}")

    async def resume(self) -> None:
        await self._say("resume")

    async def name_weights(self, name: str) -> None:
        await self._say(f"name {name.rpartition('-')[2]}")

    async def recompute_requests(self) -> None:
        await self._say("recompute")


class TwoParts:
    """Weights in two parts; says what is still open."""

    is_open = False

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncIterator[Any]]:
        self.is_open = True
        try:
            yield self._chunks()
        finally:
            self.is_open = False

    async def _chunks(self) -> AsyncIterator[Any]:
        yield CHUNK
        yield SimpleNamespace(**{**vars(CHUNK), "names": ("model.norm.weight", "lm_head.weight")})


def test_a_part_names_its_tensors_and_carries_the_handle_of_their_buffer() -> None:
    info = to_update_info(CHUNK)
    handles = pickle.loads(base64.b64decode(info.pop("ipc_handles_pickled")))  # noqa: S301 - our own
    assert handles == {"GPU-1": ("args", 7)}
    assert info == {
        "names": ["model.embed_tokens.weight", "lm_head.weight"],
        "dtype_names": ["bfloat16", "bfloat16"],
        "shapes": [[4, 2], [4, 2]],
        "tensor_sizes": [16, 16],
    }


async def test_requests_are_paused_while_weights_come_and_the_memory_is_kept_until_they_are_there() -> None:
    calls, shared = TalkativeVllm(), TwoParts()
    dialect = VllmDialect(calls.url, VllmUse(end_ids=(2,), replaces_weights=True, reads_memory=True), calls)
    weights: Any = shared
    await dialect.receive_weights(weights, 7)
    parts = ["update model.embed_tokens.weight", "update model.norm.weight"]
    assert calls.asked == ["pause keep", "start", *parts, "finish", "name 7", "recompute", "resume"]
    assert not shared.is_open


async def test_a_part_that_cannot_be_read_ends_the_update_and_requests_go_on() -> None:
    calls, shared = TalkativeVllm(fails_at="update model.norm.weight"), TwoParts()
    dialect = VllmDialect(calls.url, VllmUse(end_ids=(2,), replaces_weights=True, across_updates="end"), calls)
    weights: Any = shared
    with pytest.raises(ServerGoneError, match="it broke"):
        await dialect.receive_weights(weights, 7)
    assert calls.asked[:2] == ["pause wait", "start"]
    assert calls.asked[-2:] == ["finish", "resume"], "else no later update would be taken"
    assert not shared.is_open


async def test_a_server_that_was_not_started_for_it_is_refused_with_what_to_start_it_with() -> None:
    words = (
        r"127\.0\.0\.1:1 does not take weights that way.*VLLM_ALLOW_INSECURE_SERIALIZATION=1 and --weight-transfer-c"
    )
    for error in (ServerGoneError("status 500: not configured", 500), ServerRefusedError("status 422: packed?", 422)):
        with pytest.raises(ConfigError, match=words):
            await init_ipc(TalkativeVllm(fails_at="init", error=error))


async def test_a_server_that_is_down_when_it_should_begin_is_gone_and_not_started_wrongly() -> None:
    for status, healthy in ((None, True), (500, False), (502, True), (503, True), (429, True)):
        calls = TalkativeVllm(fails_at="init", error=ServerGoneError(f"it says {status}", status), healthy=healthy)
        with pytest.raises(ServerGoneError, match=f"it says {status}"):
            await init_ipc(calls)
