"""Opponents behind an address: what is waited for, and what is an error of theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from local_server import serving
from turnwise.envs.base import user
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.judges import models
from turnwise.judges.models import AddressModel, JudgeBusyError
from turnwise.opponents import players
from turnwise.opponents.players import AddressOpponent

NO_GAME = cast(Any, None)


def busy_first(times: int, status: int, *headers: tuple[bytes, bytes]) -> tuple[Callable[..., Any], list[int]]:
    """A server that refuses the first requests, and the statuses that it has sent."""
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await receive()
        is_busy = len(sent) < times
        sent.append(status if is_busy else 200)
        body = "busy" if is_busy else json.dumps({"choices": [{"message": {"role": "assistant", "content": "Accept"}}]})
        start = {"type": "http.response.start", "status": sent[-1], "headers": list(headers) if is_busy else []}
        await send(start)
        await send({"type": "http.response.body", "body": body.encode()})

    return app, sent


def player(address: str, deadline_s: float = 20.0) -> AddressOpponent:
    return AddressOpponent(name="it", model=AddressModel(base_url=address, model="m"), deadline_s=deadline_s)


async def test_an_address_that_asks_to_wait_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(players, "RATE_LIMIT_WAIT_S", 0.01)
    for status, headers in ((429, [(b"retry-after", b"0")]), (503, [(b"retry-after", b"0")]), (429, [])):
        app, sent = busy_first(2, status, *headers)
        with serving(app) as address:
            assert await player(address).reply(NO_GAME, [user("Hi")], 0) == "Accept"
        assert sent == [status, status, 200]


async def test_an_address_that_names_no_time_to_wait_is_not_asked_without_a_pause() -> None:
    app, sent = busy_first(10**6, 429, (b"retry-after", b"0"))
    with serving(app) as address, pytest.raises(AttemptFailed, match=r"more than is left of 0\.5 s"):
        await player(address, deadline_s=0.5).reply(NO_GAME, [user("Hi")], 0)
    assert 1 <= len(sent) <= 5


async def test_a_wait_beyond_the_deadline_fails_at_once_with_the_opponent_to_blame() -> None:
    app, sent = busy_first(9, 429, (b"retry-after", b"30"))
    with serving(app) as address, pytest.raises(AttemptFailed, match="asks for 30 s, more than is left") as failure:
        await player(address).reply(NO_GAME, [user("Hi")], 0)
    assert failure.value.party is Party.OPPONENT
    assert sent == [429]


async def test_an_error_that_does_not_ask_to_wait_is_not_waited_for() -> None:
    app, sent = busy_first(9, 500)
    with serving(app) as address, pytest.raises(JudgeBusyError, match="status 500"):
        await player(address).reply(NO_GAME, [user("Hi")], 0)
    assert sent == [500]


def test_a_missing_package_is_told_with_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="an opponent behind an address needs the package httpx2"):
        AddressModel(base_url="http://x/v1", model="m", asker="an opponent")
    with pytest.raises(ConfigError, match="a judge behind an address"):
        AddressModel(base_url="http://x/v1", model="m")
