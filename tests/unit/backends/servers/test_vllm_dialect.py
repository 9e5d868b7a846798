"""What vLLM's answers mean: logprobs that it does not have are never taken for numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from turnwise.backends.servers.dialect import ServedWeights
from turnwise.backends.servers.http import ServerGoneError
from turnwise.backends.servers.vllm_calls import VllmHttp, VllmModel
from turnwise.backends.servers.vllm_dialect import VllmDialect, VllmUse
from turnwise.types import SampleRequest, SamplingParams

OWN = ServedWeights(version=0)


class Answering(VllmHttp):
    """A vLLM that draws one token; its logprobs are attributes."""

    logprob, prompt_logprob = -1.0, -2.0
    weights: str | None = "default"
    """What it calls its weights; None: it does not say."""

    async def describe(self, needed: Collection[str]) -> VllmModel:  # noqa: ARG002
        return VllmModel(name="m", source="/models/m", context_length=64, takes_adapters=False)

    async def pause(self, mode: str) -> None:
        pass

    async def reload(self, directory: Path) -> None:
        pass

    async def name_weights(self, name: str) -> None:
        self.weights = name

    async def recompute_requests(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def generate(self, body: Mapping[str, Any]) -> Any:
        temperature = body["sampling_params"]["temperature"]
        best = [{"rank": rank, "logprob": -rank / temperature} for rank in range(1, 6)]
        drawn = {"logprob": self.logprob, "top_logprobs": best}
        spans = [] if self.weights is None else [{"version": self.weights, "start": 0, "end": 1}]
        choice = {"index": 0, "finish_reason": "length", "token_ids": [7], "logprobs": {"content": [drawn]}}
        scored = [None, *({str(token): {"logprob": self.prompt_logprob, "rank": 1}} for token in body["token_ids"][1:])]
        return {
            "choices": [{**choice, "weight_versions": spans}],
            "usage": {},
            "prompt_logprobs": scored,
        }


async def test_a_logprob_that_vllm_does_not_have_blames_the_server() -> None:
    calls = Answering("http://nowhere")
    dialect = VllmDialect(calls.url, VllmUse(end_ids=(2,)), calls)
    await dialect.facts()
    request = SampleRequest((4, 5, 6), SamplingParams(max_tokens=1), include_prompt_logprobs=True)
    answer = await dialect.generate(request, OWN)
    assert (answer.sequences[0].logprobs, answer.prompt_logprobs) == ([-1.0], [None, -2.0, -2.0])
    calls.logprob = -9999.0  # what vLLM says for NaN, minus infinity, and a token without an entry
    with pytest.raises(ServerGoneError, match="http://nowhere returned a logprob of -9999"):
        await dialect.generate(request, OWN)
    calls.logprob, calls.prompt_logprob = -1.0, -9999.0
    with pytest.raises(ServerGoneError, match="returned a logprob of -9999"):
        await dialect.generate(request, OWN)


REQUEST = SampleRequest((4, 5, 6), SamplingParams(max_tokens=1))


async def test_adapters_are_not_sampled_with_weights_that_another_program_brought() -> None:
    calls = Answering("http://nowhere")
    dialect = VllmDialect(calls.url, VllmUse(end_ids=(2,)), calls)
    await dialect.facts()
    assert (await dialect.generate(REQUEST, OWN)).sequences[0].tokens == [7]
    calls.weights = "step-1"
    with pytest.raises(ServerGoneError, match=r"has other weights than this run needs \(step-1\)"):
        await dialect.generate(REQUEST, OWN)
    await dialect.facts()  # the fleet asks again before it lets a server back in
    with pytest.raises(ServerGoneError, match=r"has other weights than this run needs \(step-1\)"):
        await dialect.generate(REQUEST, OWN)
    calls.weights = "default"
    assert (await dialect.generate(REQUEST, OWN)).sequences[0].versions is None


async def test_a_token_without_a_name_of_its_weights_is_no_answer_once_they_were_replaced() -> None:
    calls = Answering("http://nowhere")
    dialect = VllmDialect(calls.url, VllmUse(end_ids=(2,), replaces_weights=True), calls)
    await dialect.facts()
    await dialect.replace_weights([Path("/served/v4/model.safetensors")], 4)
    assert (await dialect.generate(REQUEST, ServedWeights(version=3))).sequences[0].versions == [4]
    calls.weights = None
    with pytest.raises(ServerGoneError, match="weight_versions name 0 tokens of 1"):
        await dialect.generate(REQUEST, ServedWeights(version=3))
