"""The real `openai` package against a real `turnwise serve` process."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from service_process import ServerProcess

HELLO: Any = [{"role": "user", "content": "Say a number."}]
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def server(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    assert tiny_dir.is_dir()
    with ServerProcess(tmp_path_factory.mktemp("service")) as process:
        yield process
        assert "ERROR" not in "".join(process.log), process.log


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0) as made:
        yield made


def count(server: ServerProcess, name: str) -> float:
    """A value of /metrics; 0 before it is first counted."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def wait_for(server: ServerProcess, name: str, value: float) -> None:
    """Ask until a counter has reached a value; each question is a round trip, so this does not spin."""
    until = time.monotonic() + DEADLINE_S
    while count(server, name) < value:
        assert time.monotonic() < until, f"{name} did not reach {value}"


CANCELLED = 'turnwise_requests_total{kind="Sample",outcome="failed_user"}'
RUNNING = 'turnwise_samples_running{model="tiny"}'


def test_a_chat_is_answered_with_the_packages_own_types(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=10, seed=1, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 10
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    same = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=10, seed=1)
    assert same.choices[0].message.content == answer.choices[0].message.content


def test_a_stream_gives_the_same_text_piece_by_piece(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=24, seed=2)
    pieces: list[str] = []
    usage = None
    for chunk in client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=24, seed=2, stream=True, stream_options={"include_usage": True}
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert sum(bool(piece) for piece in pieces) > 5
    assert usage is not None
    assert usage.completion_tokens == 24


def test_the_packages_stream_helper_puts_a_message_together(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=40, seed=3)
    text = whole.choices[0].message.content or ""
    stop = text[20:22]  # the helper refuses replies that a limit cut
    with client.chat.completions.stream(model="tiny", messages=HELLO, max_tokens=40, seed=3, stop=stop) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.find(stop)]


def test_raw_text_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["abc", "def"], max_tokens=4, logprobs=1, echo=True)
    assert [choice.text[:3] for choice in answer.choices] == ["abc", "def"]
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "turnwise"


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'"):
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty") as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, frequency_penalty=1.0)
    assert caught.value.param == "frequency_penalty"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt=[5] * 2000)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt=[5] * 2000, stream=True)


async def test_many_calls_at_once_are_batched_and_all_answered(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S) as client:
        calls = [client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=i) for i in range(32)]
        answers = await asyncio.gather(*calls)
        again = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=7)
    assert again.choices[0].message.content == answers[7].choices[0].message.content, "the batch changes nothing"
    assert len({answer.choices[0].message.content for answer in answers}) > 16


def test_a_client_that_leaves_a_stream_ends_the_sampling(server: ServerProcess, client: openai.OpenAI) -> None:
    before = count(server, CANCELLED)
    stream = client.completions.create(model="tiny", prompt="abc", max_tokens=1000, n=64, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(server, CANCELLED, before + 1)
    assert count(server, RUNNING) == 0


def test_a_client_that_leaves_while_it_waits_ends_the_sampling(server: ServerProcess) -> None:
    before, calls = count(server, CANCELLED), 'turnwise_http_requests_total{route="/v1/completions",status="499"}'
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 1000, "n": 128}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as line:
        line.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        until = time.monotonic() + DEADLINE_S
        while count(server, RUNNING) == 0:
            assert time.monotonic() < until, "it never began"
    wait_for(server, CANCELLED, before + 1)
    wait_for(server, calls, 1)
    assert count(server, RUNNING) == 0


def test_an_agent_that_knows_nothing_of_captures_is_recorded(server: ServerProcess) -> None:
    def post(path: str, body: object) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{server.url}{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    capture = post("/v1/captures", {"model": "tiny", "task_id": "t", "temperature": 1.0})
    with openai.OpenAI(base_url=capture["base_url"], api_key="none", timeout=DEADLINE_S) as agent:
        messages: Any = [{"role": "user", "content": "First?"}]
        for _ in range(3):
            said = agent.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=6, top_p=0.9)
            messages += [said.choices[0].message, {"role": "user", "content": "Next?"}]
    post(f"/v1/captures/{capture['id']}/reward", {"reward": 1.0})
    with urllib.request.urlopen(f"{server.url}/v1/captures/{capture['id']}", timeout=120) as answer:
        turns = json.load(answer)["trajectory"]["turns"]
    assert len(turns) == 3
    for before, after in itertools.pairwise(turns):
        known = [*before["prompt_ids"], *before["sampled_ids"]]
        assert after["prompt_ids"][: len(known)] == known
    assert turns[-1]["reward_parts"] == {"outcome": 1.0}
