"""What vLLM's answers mean: logprobs that it does not have are never taken for numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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

    async def describe(self, needed: Collection[str]) -> VllmModel:  # noqa: ARG002
        return VllmModel(name="m", source="/models/m", context_length=64, takes_adapters=False)

    async def generate(self, body: Mapping[str, Any]) -> Any:
        temperature = body["sampling_params"]["temperature"]
        best = [{"rank": rank, "logprob": -rank / temperature} for rank in range(1, 6)]
        drawn = {"logprob": self.logprob, "top_logprobs": best}
        scored = [None, *({str(token): {"logprob": self.prompt_logprob, "rank": 1}} for token in body["token_ids"][1:])]
        return {
            "choices": [{"index": 0, "finish_reason": "length", "token_ids": [7], "logprobs": {"content": [drawn]}}],
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
