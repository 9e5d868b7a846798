"""The OpenAI endpoints over the application in process: exact ids in, the engine's own numbers out."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.routing import APIRoute

from turnwise.client.engines import LoadedModel
from turnwise.renderers import get_renderer
from turnwise.service import metrics
from turnwise.service.access import create_key
from turnwise.service.openai import chat as openai_chat
from turnwise.service.openai import gateway as openai_gateway
from turnwise.service.openai import routes as openai
from turnwise.trajectory import Message
from turnwise.types import SampleRequest, SamplingParams
from unit.service.conftest import TOKENS, Serve, Wire

HELLO = [{"role": "user", "content": "Say a number."}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
            "required": ["a"],
        },
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


async def ask(wire: Wire, path: str = "/v1/chat/completions", **body: Any) -> Any:
    body = {"model": "tiny", **({} if path == "/v1/completions" else {"messages": HELLO}), **body}
    return await wire.http.post(path, json=body, headers=wire.headers)


async def chat(wire: Wire, **body: Any) -> Any:
    answer = await ask(wire, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(answer: Any) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def teach(wire: Wire, prompt: list[int], reply: list[int]) -> str:
    """A checkpoint whose greedy answer to `prompt` is `reply`."""
    model = await wire.model(rank=16)
    tokens = [*prompt, *reply]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(reply)
    shape = {"shape": [len(weights)]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", **shape},
            "weights": {"data": weights, "dtype": "float32", **shape},
        },
    }
    seq, loss = 0, float("inf")
    for _ in range(150):
        body = {"model_id": model, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
        promise = await wire.ok("/forward_backward", {**body, "seq_id": seq + 1})
        loss = (await wire.result(promise))["metrics"]["loss:sum"]
        await wire.result(await wire.step(model, seq + 2, rate=1e-2 if loss > 20 else 3e-3))
        seq += 2
        if loss < 0.3:
            break
    assert loss < 0.3, "it did not learn"
    saved = await wire.ok("/save_weights_for_sampler", {"model_id": model, "seq_id": seq + 1, "path": "taught"})
    return (await wire.result(saved))["path"]


async def test_the_reply_is_what_the_engine_draws_from_the_rendered_ids(serve: Serve, engine_held: LoadedModel) -> None:
    renderer = get_renderer(engine_held.get_tokenizer())
    prompt = renderer.start([Message(role="user", content="Say a number.")])
    params = SamplingParams(max_tokens=12, seed=7, temperature=0.8, stop_token_ids=list(renderer.stop_ids))
    worker = engine_held.worker
    direct = worker.sample(SampleRequest(prompt, params, 2), worker.engine.base_policy).result(30)
    async with serve() as wire:
        told = await chat(wire, max_tokens=12, seed=7, temperature=0.8, n=2, logprobs=True, return_token_ids=True)
    assert told["prompt_token_ids"] == prompt
    assert told["usage"]["prompt_tokens"] == len(prompt)
    for choice, sequence in zip(told["choices"], direct.sequences, strict=True):
        assert choice["token_ids"] == list(sequence.tokens)
        kept = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        np.testing.assert_allclose(kept, list(sequence.logprobs or [])[: len(kept)], atol=1e-5)
        assert choice["message"]["content"] == renderer.parse(sequence.tokens).content


async def test_a_streamed_reply_is_the_whole_one_in_pieces(serve: Serve) -> None:
    options = {"max_completion_tokens": 16, "seed": 3, "n": 2, "logprobs": True, "return_token_ids": True}
    async with serve() as wire:
        whole = await chat(wire, **options)
        chunks = events(await ask(wire, stream=True, stream_options={"include_usage": True}, **options))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"],
    }
    for index, choice in enumerate(whole["choices"]):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content") or "" for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [e["token"] for e in choice["logprobs"]["content"]]
        assert [token for c in own for token in c.get("token_ids", [])] == choice["token_ids"]
        assert sum(bool(c["delta"].get("content")) for c in own) > 4, "it comes in pieces"


async def test_alternatives_are_the_most_probable_tokens(serve: Serve, engine_held: LoadedModel) -> None:
    async with serve() as wire:
        told = await chat(wire, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3, return_token_ids=True)
    (choice,) = told["choices"]
    worker = engine_held.worker
    whole = [*told["prompt_token_ids"], *choice["token_ids"]]
    asked = replace(SampleRequest.scoring(whole), topk_prompt_logprobs=3)
    scored = worker.sample(asked, worker.engine.base_policy).result(30)
    assert scored.topk_prompt_logprobs is not None
    rows = scored.topk_prompt_logprobs[len(told["prompt_token_ids"]) :]
    for entry, row in zip(choice["logprobs"]["content"], rows, strict=False):
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([p for _, p in row or ()], abs=1e-5)
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"], abs=1e-5), (
            "greedy takes the first"
        )


async def test_a_stop_string_ends_the_reply_before_itself(serve: Serve) -> None:
    async with serve() as wire:
        whole = (await chat(wire, max_tokens=20, seed=5))["choices"][0]["message"]["content"]
        stop = whole[6:8]
        cut = (await chat(wire, max_tokens=20, seed=5, stop=[stop, "never"], logprobs=True))["choices"][0]
        streamed = events(await ask(wire, max_tokens=20, seed=5, stop=stop, stream=True))
    assert cut["message"]["content"] == whole[: whole.find(stop)]
    assert cut["finish_reason"] == "stop"
    assert "".join(entry["token"] for entry in cut["logprobs"]["content"]).startswith(cut["message"]["content"])
    texts = [c["delta"].get("content") or "" for chunk in streamed for c in chunk["choices"]]
    assert "".join(texts) == cut["message"]["content"]


async def test_a_policy_that_learned_to_call_a_tool_is_answered_with_tool_calls(
    serve: Serve, engine_held: LoadedModel
) -> None:
    renderer = get_renderer(engine_held.get_tokenizer())
    async with serve() as wire:
        shown = await chat(wire, tools=[ADD], max_tokens=1, return_token_ids=True)
        system = engine_held.get_tokenizer().decode(shown["prompt_token_ids"])
        assert "- add(a: integer, b: integer = 1): Add two numbers." in system
        reply = renderer.encode_reply(Message(role="assistant", content=f"Adding.\n{CALL}"))
        path = await teach(wire, shown["prompt_token_ids"], reply)
        (choice,) = (await chat(wire, model=path, tools=[ADD], temperature=0))["choices"]
        chunks = events(await ask(wire, model=path, tools=[ADD], temperature=0, stream=True))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Adding."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 2}'}
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Adding."
    (streamed,) = [one for delta in deltas for one in delta.get("tool_calls", [])]
    assert (streamed["index"], streamed["function"]) == (0, call["function"])


async def test_echo_scores_a_prompt_as_the_engine_does(serve: Serve, engine_held: LoadedModel) -> None:
    ids = engine_held.get_tokenizer()("abc def ghi")["input_ids"]
    known = engine_held.worker.compute_logprobs(ids, engine_held.worker.engine.base_policy).result(30)
    options = {"max_tokens": 0, "echo": True, "logprobs": 1}
    async with serve() as wire:
        answers = [await ask(wire, "/v1/completions", prompt=prompt, **options) for prompt in ("abc def ghi", [ids])]
    (first,), (second,) = (answer.json()["choices"] for answer in answers)
    assert first == second
    assert first["text"] == "abc def ghi"
    assert first["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["token_logprobs"][1:] == pytest.approx(known[1:], abs=1e-5)
    assert first["logprobs"]["text_offset"][-1] < len("abc def ghi")
    assert "".join(first["logprobs"]["tokens"]) == "abc def ghi"


async def test_raw_text_streams_too_and_stops_at_its_own_stop(serve: Serve) -> None:
    options = {"prompt": "abc", "max_tokens": 12, "seed": 1, "logprobs": 0}
    async with serve() as wire:
        whole = (await ask(wire, "/v1/completions", **options)).json()["choices"][0]
        chunks = events(await ask(wire, "/v1/completions", stream=True, **options))
    own = [c for chunk in chunks for c in chunk["choices"]]
    assert "".join(c["text"] for c in own) == whole["text"]
    tokens = [token for c in own if c["logprobs"] for token in c["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]
    assert own[-1]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"logprobs": True, "top_logprobs": 2, "temperature": 0.5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 2, "stream": True}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"made_up": 1}, "made_up"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(serve: Serve, options: dict[str, Any], word: str) -> None:
    async with serve() as wire:
        answer = await ask(wire, **options)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]
    assert error["param"] == word


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
    ],
)
async def test_messages_that_cannot_be_rendered_are_refused(serve: Serve, messages: list[Any]) -> None:
    async with serve() as wire:
        answer = await ask(wire, messages=messages)
        prompt = await ask(wire, "/v1/completions", prompt="x" * 40_000)
    assert answer.status_code == 400
    assert "error" in answer.json()
    assert prompt.status_code == 400, "longer than the model's context"


async def test_parts_of_a_message_are_one_text(serve: Serve) -> None:
    parts = [{"type": "text", "text": "Say a "}, {"type": "text", "text": "number."}]
    async with serve() as wire:
        one = await chat(wire, max_tokens=1, return_token_ids=True)
        other = await chat(wire, messages=[{"role": "user", "content": parts}], max_tokens=1, return_token_ids=True)
    assert one["prompt_token_ids"] == other["prompt_token_ids"]


async def test_a_key_is_needed_where_there_are_keys_and_anothers_weights_are_not_there(serve: Serve) -> None:
    async with serve() as wire:
        store = wire.service.store
        alice, bob = wire.with_key(create_key(store, "alice")), wire.with_key(create_key(store, "bob"))
        path = await teach(alice, [5, 6, 7], [8, 9])
        refused = await ask(wire, max_tokens=1)
        bearer = {"authorization": f"Bearer {alice.headers['x-api-key']}"}
        body = {"model": path, "messages": HELLO, "max_tokens": 1}
        own = await wire.http.post("/v1/chat/completions", json=body, headers=bearer)
        others, absent = await ask(bob, model=path), await ask(bob, model=path.replace("taught", "absent"))
        listed = [(await wire.http.get("/v1/models", headers=one.headers)).json()["data"] for one in (alice, bob)]
        metrics = [await wire.http.get("/metrics", headers=one.headers) for one in (wire, alice)]
        health = await wire.http.get("/healthz")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert own.status_code == 200
    assert others.status_code == absent.status_code == 404
    assert others.json()["error"]["message"].replace("taught", "absent") == absent.json()["error"]["message"]
    assert [[model["id"] for model in models] for models in listed] == [["tiny", path], ["tiny"]]
    assert [answer.status_code for answer in metrics] == [401, 200]
    assert health.json()["service"] == "turnwise"


async def test_a_sampling_session_is_a_model_and_so_is_a_checkpoint(serve: Serve) -> None:
    async with serve() as wire:
        path = await teach(wire, [5, 6, 7], [8, 9])
        session = await wire.session()
        made = await wire.ok(
            "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        )
        options = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0, "return_token_ids": True}
        answers = [
            await ask(wire, "/v1/completions", model=model, **options) for model in (path, made["sampling_session_id"])
        ]
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == [[8, 9], [8, 9]]


async def test_tokens_steps_and_calls_are_counted(serve: Serve) -> None:
    async with serve() as wire:
        told = await chat(wire, max_tokens=9, seed=1)
        await ask(wire, n=0)
        model = await wire.model()
        await wire.result(await wire.train(model, 1))
        await wire.result(await wire.step(model, 2))
        text = (await wire.http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["turnwise_sampled_tokens_total"]) == told["usage"]["completion_tokens"]
    assert float(values["turnwise_optimizer_steps_total"]) == 1
    assert float(values["turnwise_trained_tokens_total"]) == 6
    assert float(values['turnwise_http_requests_total{route="/v1/chat/completions",status="400"}']) == 1
    assert float(values["turnwise_requests_waiting"]) == 0
    assert float(values['turnwise_engine_up{model="tiny"}']) == 1


def test_every_endpoint_is_on_its_page() -> None:
    page = (Path(__file__).parents[4] / "docs" / "service_openai.md").read_text(encoding="utf-8")
    routes = [route for one in (openai.router, metrics.router) for route in one.routes]
    for route in routes:
        assert isinstance(route, APIRoute)
        for method in route.methods or ():
            assert f"`{method} {route.path}`" in page


ODD = "\\ud800"
"""Half a surrogate pair, as JSON writes it."""
DEEP = '{"anyOf": [' * 400 + "{}" + "]}" * 400
CALLED = (
    '{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", '
    '"tool_calls": [{"function": {"name": "f", "arguments": "{\\"name\\": \\"\\\\ud800\\"}"}}]}, '
    '{"role": "user", "content": "y"}]}'
)
NESTED = (
    '{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": [{"type": '
    '"function", "function": {"name": "f", "parameters": {"properties": {"a": DEEP}}}}]}'
)


@pytest.mark.parametrize(
    "body",
    [
        '{"model": "tiny", "messages": [{"role": "user", "content": "ODD"}]}',
        '{"model": "tiny", "ODD": 1, "messages": [{"role": "user", "content": "x"}]}',
        '{"model": "ODD", "messages": [{"role": "user", "content": "x"}]}',
        CALLED,
        '{"model": "tiny", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        NESTED,
        '{"model": "tiny", "messages": [',
        "[" * 5000,
        "null",
        "[]",
        "",
    ],
)
async def test_odd_bodies_are_answered_and_never_break_the_server(serve: Serve, body: str) -> None:
    sent = body.replace("ODD", ODD).replace("DEEP", DEEP).encode()
    headers = {"content-type": "application/json"}
    async with serve() as wire:
        answers = [await wire.http.post("/v1/chat/completions", content=sent, headers=headers)]
        capture = (await wire.http.post("/v1/captures", json={"model": "tiny"})).json()
        answers.append(await wire.http.post(f"{capture['base_url']}/chat/completions", content=sent, headers=headers))
        answers.append(await wire.http.get(f"/v1/captures/{capture['id']}"))
        answers.append(await wire.http.post("/v1/captures", content=sent, headers=headers))
    assert all(answer.status_code in (200, 400, 404) for answer in answers), [answer.text for answer in answers]
    assert all("error" in answer.json() for answer in answers if answer.status_code != 200)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_is_given_up_and_so_is_its_sampling(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with serve() as wire:
        await chat(wire, max_tokens=1)  # the tokenizer is there
        for module in (openai_gateway, openai_chat):
            monkeypatch.setattr(module, "DEADLINE_S", 0.05)
        answer = await ask(wire, max_tokens=1000, n=128, stop=[], stream=stream)
        cancelled = 'turnwise_requests_total{kind="Sample",outcome="failed_user"} 1.0'
        async with asyncio.timeout(30):
            while cancelled not in (await wire.http.get("/metrics")).text:
                await asyncio.sleep(0.01)
        assert wire.service.sampling.num_running("tiny") == 0
    if stream and answer.status_code == 200:
        assert json.loads(answer.text.strip().rsplit("data: ", 1)[1])["error"]["code"] == "timeout"
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"


async def test_a_checkpoint_that_was_written_over_answers_with_its_new_weights(serve: Serve) -> None:
    async with serve() as wire:
        model = await wire.model()
        found = []
        for seq in (1, 4):
            await wire.train(model, seq)
            await wire.step(model, seq + 1)
            body = {"model_id": model, "seq_id": seq + 2, "path": "now", "overwrite": True}
            path = (await wire.result(await wire.ok("/save_weights_for_sampler", body)))["path"]
            options = {"prompt": TOKENS, "max_tokens": 0, "echo": True, "logprobs": 0}
            answer = await ask(wire, "/v1/completions", model=path, **options)
            found.append(answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:])
    assert sum(found[1]) > sum(found[0]), "it learned these very tokens in between"
