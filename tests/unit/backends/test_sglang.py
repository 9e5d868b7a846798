"""SGLang's dialect: against answers of a real server, and against a small server that behaves like it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from local_server import serving
from sglang_stub import SglangStub, sglang_stubs
from turnwise.backends.servers.dialect import ServedWeights
from turnwise.backends.servers.http import ServerGoneError, ServerRefusedError
from turnwise.backends.sglang import SglangDialect
from turnwise.client.checkpoints import CheckpointStore
from turnwise.errors import ConfigError
from turnwise.types import ModelInput, SampleRequest, SamplingParams

ANSWERS: dict[str, Any] = json.loads(Path(__file__).with_name("sglang_answers.json").read_text())
PROMPT = [2683, 314, 253, 1194, 282, 5328, 28]
OWN = ServedWeights(version=0)


@asynccontextmanager
async def talking(url: str, **options: Any) -> AsyncIterator[SglangDialect]:
    dialect = SglangDialect(url, **options)
    try:
        yield dialect
    finally:
        await dialect.close()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stub")


@pytest.fixture(scope="module")
def stub(data_dir: Path, tiny_dir: Path) -> Iterator[SglangStub]:
    assert tiny_dir.is_dir()
    with sglang_stubs(1, data_dir) as (one,):
        yield one


@pytest.fixture(scope="module")
def adapter(stub: SglangStub, data_dir: Path) -> Path:
    trainer = stub.service.create_lora_training_client("tiny", rank=4, seed=1)
    return CheckpointStore(data_dir).directory(trainer.save_weights_for_sampler("one").result().path)


class Recorded:
    """A server that answers what a real one answered once."""

    def __init__(self, **changes: Any) -> None:
        answer = json.loads(json.dumps(ANSWERS["generate"]))
        answer["meta_info"] |= changes
        self.answers = [answer]
        self.bodies: list[dict[str, Any]] = []
        self.info: dict[str, Any] = dict(ANSWERS["model_info"])
        self.update: dict[str, Any] = ANSWERS["update_weights_from_disk"]
        self.called: list[tuple[str, Any]] = []
        """What else it was asked."""

    def app(self) -> Starlette:
        async def generate(request: Request) -> JSONResponse:
            self.bodies.append(await request.json())
            return JSONResponse(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

        async def info(_: Request) -> JSONResponse:
            return JSONResponse(self.info)

        async def other(request: Request) -> JSONResponse:
            name = request.url.path.removeprefix("/")
            self.called.append((name, await request.json()))
            return JSONResponse(self.update if name == "update_weights_from_disk" else ANSWERS[name])

        others = ("pause_generation", "update_weights_from_disk", "continue_generation")
        return Starlette(
            routes=[
                Route("/generate", generate, methods=["POST"]),
                Route("/model_info", info),
                *(Route(f"/{name}", other, methods=["POST"]) for name in others),
            ]
        )


async def test_the_answers_of_a_real_server_become_ids_and_logprobs() -> None:
    recorded = Recorded(cached_tokens=6)
    request = SampleRequest(PROMPT, SamplingParams(max_tokens=6, seed=7), include_prompt_logprobs=True)
    with serving(recorded.app()) as url:
        async with talking(url) as dialect:
            assert (await dialect.facts()).model == "MODEL_DIR"
            response = await dialect.generate(request, OWN)
    (sequence,) = response.sequences
    assert sequence.tokens == [198, 37319, 31977, 216, 33, 365]
    assert sequence.logprobs == [entry[0] for entry in ANSWERS["generate"]["meta_info"]["output_token_logprobs"]]
    assert sequence.stop_reason == "length"
    assert response.num_cached_prompt_tokens == 6
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[:2] == [None, -3.879976749420166]
    body = recorded.bodies[0]
    assert body["input_ids"] == PROMPT, "ids, never text"
    assert body["sampling_params"]["sampling_seed"] == 7
    assert body["return_logprob"] is True


async def test_a_reply_that_was_aborted_on_the_server_is_continued_by_ids_and_never_taken_for_a_whole_one() -> None:
    recorded = Recorded(finish_reason=ANSWERS["aborted"]["finish_reason"])
    recorded.answers.append(ANSWERS["generate"])
    with serving(recorded.app()) as url:
        async with talking(url) as dialect:
            response = await dialect.generate(SampleRequest(PROMPT, SamplingParams(max_tokens=12)), OWN)
    first = ANSWERS["generate"]["output_ids"]
    assert response.sequences[0].tokens == [*first, *first]
    assert recorded.bodies[1]["input_ids"] == [*PROMPT, *first]
    assert recorded.bodies[1]["sampling_params"]["max_new_tokens"] == 6


def retracted() -> Recorded:
    """A server that drew one reply with two weights."""
    recorded = Recorded(**json.loads(json.dumps(ANSWERS["retracted"])))
    (answer,) = recorded.answers
    num_drawn = answer["meta_info"]["weight_versions"][-1]["end"]
    answer["output_ids"] = [5] * num_drawn
    answer["meta_info"]["output_token_logprobs"] = [[-1.0, 5, None]] * num_drawn
    return recorded


async def test_a_reply_that_was_retracted_for_new_weights_names_the_version_of_every_token(tmp_path: Path) -> None:
    request, recorded = SampleRequest(PROMPT, SamplingParams(max_tokens=60)), retracted()
    spans: list[dict[str, Any]] = recorded.answers[0]["meta_info"]["weight_versions"]
    with serving(recorded.app()) as url:
        async with talking(url, replaces_weights=True) as dialect:
            await dialect.facts()
            for version, span in zip((4, 5), spans, strict=True):
                await dialect.replace_weights([tmp_path / "model.safetensors"], version)
                span["version"] = recorded.called[-2][1]["weight_version"]
            (sequence,) = (await dialect.generate(request, OWN)).sequences
            assert sequence.versions == [4] * 8 + [5] * 52
            spans.pop()
            with pytest.raises(ServerGoneError, match="drew 60 tokens and says of 8 which weights drew them"):
                await dialect.generate(request, OWN)


async def test_a_reply_of_weights_that_somebody_else_brought_blames_the_server(tmp_path: Path) -> None:
    request, recorded = SampleRequest(PROMPT, SamplingParams(max_tokens=60)), retracted()
    with serving(recorded.app()) as url:
        async with talking(url) as dialect:
            await dialect.facts()  # it has the weights that it calls "default"
            with pytest.raises(ServerGoneError, match=r"other weights than when it was let in \(step-1\)"):
                await dialect.generate(request, OWN)
            recorded.info |= {"weight_version": "step-1"}
            with pytest.raises(ConfigError, match=r"somebody replaced them\. Start it again with the run's model"):
                await dialect.facts()
        async with talking(url, replaces_weights=True) as dialect:
            await dialect.facts()  # whatever it has is replaced
            await dialect.replace_weights([tmp_path / "model.safetensors"], 4)
            with pytest.raises(ServerGoneError, match=r"other weights than when it was let in \(default\)"):
                await dialect.generate(request, OWN)


async def test_weights_are_read_from_a_directory_while_requests_are_paused(tmp_path: Path) -> None:
    recorded, files = Recorded(), [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    with serving(recorded.app()) as url:
        async with talking(url, replaces_weights=True) as dialect:
            await dialect.replace_weights(files, 7)
            names = ["pause_generation", "update_weights_from_disk", "continue_generation"]
            assert [name for name, _ in recorded.called] == names
            assert recorded.called[0][1] == {"mode": "retract"}
            asked = recorded.called[1][1]
            assert asked["weight_version"].startswith("turnwise-"), "no other run uses this name"
            assert asked | {"weight_version": ""} == {
                "model_path": str(tmp_path),
                "weight_version": "",
                "flush_cache": True,
            }
            recorded.info |= {"model_path": "/runs/a/served/turnwise-0-v7-0", "served_model_name": ""}
            assert (await dialect.facts()).model.endswith("turnwise-0-v7-0"), "a server that has them at first"
            recorded.info |= {"model_path": "/runs/a/served/turnwise-0-v8-1"}
            assert (await dialect.facts()).model.endswith("v7-0"), "it names itself after what it read, and is the same"
            recorded.update = recorded.update | {"success": False, "message": "no such file"}
            with pytest.raises(ServerRefusedError, match="could not update the weights to version 8: no such file"):
                await dialect.replace_weights(files, 8)
            assert recorded.called[-1][0] == "continue_generation", "the server goes on with what it has"


async def test_answers_that_make_no_sense_blame_the_server() -> None:
    request = SampleRequest(PROMPT, SamplingParams(max_tokens=6))
    wrong = {
        "logprobs of others": {"output_token_logprobs": [[-1.0, 5, None]] * 6},
        "is no answer of it": {"output_token_logprobs": [[None, 198, None]] * 6},
        "ended a reply with 'tired'": {"finish_reason": {"type": "tired"}},
        "ended the request: out of memory": {
            "finish_reason": {"type": "abort", "message": "out of memory", "status_code": 500}
        },
    }
    for message, changes in wrong.items():
        with serving(Recorded(**changes).app()) as url:
            async with talking(url) as dialect:
                with pytest.raises(ServerGoneError, match=message):
                    await dialect.generate(request, OWN)


@pytest.mark.model
async def test_the_stub_answers_in_the_shape_of_the_real_server(stub: SglangStub, adapter: Path) -> None:
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "sampling_seed": 7},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with httpx2.AsyncClient(base_url=stub.url) as http:
        said = (await http.post("/generate", json=body)).json()
        loaded = await http.post("/load_lora_adapter", json={"lora_name": "pol", "lora_path": str(adapter)})
        assert loaded.json().keys() == ANSWERS["load_lora_adapter"].keys()
        unloaded = await http.post("/unload_lora_adapter", json={"lora_name": "pol"})
        assert unloaded.json() == ANSWERS["unload_lora_adapter"]
        for route in ("pause_generation", "continue_generation"):
            assert (await http.post(f"/{route}", json={})).json() == ANSWERS[route]
    real = ANSWERS["generate"]
    assert said.keys() == real.keys()
    assert list(said["meta_info"]) == list(real["meta_info"])
    for key, value in real["meta_info"].items():
        if value is not None:
            assert type(said["meta_info"][key]) is type(value), key
    assert said["meta_info"]["input_token_logprobs"][0] == [None, 5, None]


@pytest.mark.model
async def test_logprobs_are_at_the_sampling_temperature_and_a_server_that_returns_others_is_refused(
    stub: SglangStub,
) -> None:
    prompt = [5, 6, 7, 8]
    async with talking(stub.url, temperature=0.7) as dialect:
        await dialect.facts()
        params = SamplingParams(max_tokens=8, temperature=0.7, seed=3)
        (sequence,) = (await dialect.generate(SampleRequest(prompt, params), OWN)).sequences
        engine = stub.service.create_sampling_client(base_model="tiny")
        expected = (await engine.sample_async(ModelInput.from_ints(prompt), 1, params)).sequences[0]
        assert list(sequence.tokens) == list(expected.tokens)
        assert sequence.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        stub.is_raw = True
        try:
            with pytest.raises(ConfigError, match=r"temperature 1, and the run samples at 0\.7.*ORIGINAL_LOGPROB"):
                await dialect.facts()
            async with talking(stub.url, temperature=1.0) as at_one:
                await at_one.facts()
        finally:
            stub.is_raw = False


@pytest.mark.model
async def test_stops_are_those_that_were_asked_for_and_stay_in_the_reply(stub: SglangStub) -> None:
    prompt = [5, 6, 7, 8]
    async with talking(stub.url) as dialect:

        async def draw(**options: Any) -> Any:
            params = SamplingParams(max_tokens=40, seed=3, **options)
            return (await dialect.generate(SampleRequest(prompt, params), OWN)).sequences[0]

        free = await draw(stop=[])
        assert (free.stop_reason, len(free.tokens)) == ("length", 40)
        third = await draw(stop=[free.tokens[2]])
        assert (third.stop_reason, third.tokens) == ("stop", free.tokens[:3])
        tokenizer = stub.service.create_sampling_client(base_model="tiny").get_tokenizer()
        text = next(word for word in map(tokenizer.decode, ([token] for token in free.tokens[3:])) if word.isalpha())
        ended = await draw(stop=text)
        assert ended.stop_reason == "stop"
        assert tokenizer.decode(ended.tokens).endswith(text)
        was, stub.eos = stub.eos, free.tokens[4]  # the server stops there, and nobody asked it to
        try:
            went_on = await draw(stop=[10_000_000])
            assert (went_on.stop_reason, len(went_on.tokens)) == ("length", 40)
            assert went_on.tokens[:5] == free.tokens[:5]
            assert (await draw()).tokens == free.tokens[:5], "without stops, the end of sequence is one"
        finally:
            stub.eos = was


@pytest.mark.model
async def test_adapters_are_loaded_once_and_one_that_is_lost_blames_the_server(
    stub: SglangStub, adapter: Path, tmp_path: Path
) -> None:
    weights = ServedWeights(version=1, adapter=adapter)
    request = SampleRequest([5, 6, 7, 8], SamplingParams(max_tokens=4))
    async with talking(stub.url) as dialect:
        await dialect.load(weights)
        await dialect.load(weights)
        assert (await dialect.generate(request, weights)).sequences[0].tokens
        stub.lose_adapters()
        with pytest.raises(ServerGoneError, match=f"has lost the adapter {adapter.name}"):
            await dialect.generate(request, weights)
        await dialect.unload(weights)
        with pytest.raises(ServerRefusedError, match="cannot read"):
            await dialect.load(ServedWeights(version=2, adapter=tmp_path))


@pytest.mark.model
async def test_a_cancelled_request_is_aborted_on_the_server(stub: SglangStub) -> None:
    async with talking(stub.url) as dialect:
        stub.fault, before = "hang", len(stub.aborted)
        try:
            task = asyncio.create_task(dialect.generate(SampleRequest([5, 6, 7, 8]), OWN))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(100):
                if len(stub.aborted) > before:
                    break
                await asyncio.sleep(0.01)
            assert stub.aborted[before:] == [stub.bodies[-1]["rid"]]
        finally:
            stub.fault = ""


@pytest.mark.model
async def test_new_weights_reach_a_request_under_way_which_is_read_again_or_finished_first(
    stub: SglangStub, tiny_dir: Path
) -> None:
    request, files = SampleRequest([5, 6, 7, 8], SamplingParams(max_tokens=40, stop=[])), [tiny_dir / "m.safetensors"]
    stub.chunk = 4
    try:
        for finishes in (False, True):
            async with talking(stub.url, replaces_weights=True, finishes_replies=finishes) as dialect:
                await dialect.facts()
                await dialect.replace_weights(files, 1)
                task = asyncio.create_task(dialect.generate(request, OWN))
                await asyncio.sleep(0.05)
                await dialect.replace_weights(files, 2)
                assert stub.pause_mode == "retract"
                (sequence,) = (await task).sequences
                assert len(sequence.tokens) == 40, "the reply is whole in any case"
                assert sequence.versions is not None
                assert list(sequence.versions) == sorted(sequence.versions)
                assert set(sequence.versions) == ({1} if finishes else {1, 2})
                (after,) = (await dialect.generate(request, OWN)).sequences
                assert set(after.versions or ()) == {2}
    finally:
        stub.chunk = 0
