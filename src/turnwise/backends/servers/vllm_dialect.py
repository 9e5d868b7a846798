"""How a vLLM server is spoken to: token ids in, token ids and logprobs out, adapters and weights at run time.

What the server must be started with is `REQUIRED`. Logprobs are those of the distribution that was sampled from: with
`--logprobs-mode processed_logprobs` the server divides by the temperature first, and a greedy reply has its logprobs at
temperature 1, as ours do. A server with raw logprobs is right at temperature 1 alone, and is refused otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.backends.servers.dialect import ServedWeights, ServerDialect, ServerFacts
from turnwise.backends.servers.http import JsonServer, ServerGoneError, ServerRefusedError
from turnwise.errors import ConfigError, DataError, ServiceError
from turnwise.types import SampledSequence, SampleRequest, SampleResponse

GENERATE, LOAD, UNLOAD = "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RPC, PAUSE, RESUME, RESET = "/collective_rpc", "/pause", "/resume", "/reset_prefix_cache"
REQUIRED: Mapping[str, str] = {
    GENERATE: "start the server with --enable-scale-out",
    LOAD: "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
"""Routes that every run needs, and how a server gets them."""
REQUIRED_FOR_WEIGHTS: Mapping[str, str] = {
    GENERATE: REQUIRED[GENERATE],
    RPC: "start the server with VLLM_SERVER_DEV_MODE=1",
    PAUSE: "start the server with VLLM_SERVER_DEV_MODE=1",
}
"""Routes that a run needs which replaces the whole weights."""
ASK_S, LOAD_S, GENERATE_S = 30.0, 300.0, 3600.0
"""Deadlines: for facts and switches, for weights, and for a reply (the fleet has its own, shorter one)."""
PUBLISHED = "turnwise"
"""Begins the name of every version of whole weights that a run brings."""
PROBE_IDS = (1, 2, 3, 4)
NUM_PROBED = 5
"""Best tokens whose logprobs tell whether the server heeds the temperature."""


class Turnstile:
    """Lets many requests pass side by side, or one alone.

    A vLLM that serves adapters scores a prompt with one adapter per request of its batch, so a prompt that is scored
    beside other requests ends the server ("einsum(): subscript b ..."), or gets the adapter of another request.
    """

    def __init__(self) -> None:
        self._is_free = asyncio.Condition()
        self._num_inside = 0
        self._num_alone = 0

    @contextlib.asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """Wait until nobody is alone inside, or waits to be."""
        async with self._is_free:
            await self._is_free.wait_for(lambda: not self._num_alone)
            self._num_inside += 1
        try:
            yield
        finally:
            await self._leave()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait until nobody is inside; meanwhile nobody else enters."""
        self._num_alone += 1
        try:
            async with self._is_free:
                await self._is_free.wait_for(lambda: not self._num_inside)
                self._num_inside += 1
            try:
                yield
            finally:
                await self._leave()
        finally:
            self._num_alone -= 1
            async with self._is_free:
                self._is_free.notify_all()

    async def _leave(self) -> None:
        async with self._is_free:
            self._num_inside -= 1
            self._is_free.notify_all()


class VllmDialect(ServerDialect):
    """Talks to one vLLM server."""

    def __init__(
        self,
        url: str,
        *,
        end_ids: Sequence[int],
        temperature: float = 1.0,
        replaces_weights: bool = False,
        across_updates: str = "recompute",
    ) -> None:
        """Args:
        end_ids: The model's end-of-sequence ids; a request that names no stop of its own stops at them.
        temperature: What the run samples with; a server that cannot say the logprobs of it is refused.
        replaces_weights: Whole weights are published, not adapters.
        across_updates: What happens to requests under way when weights are replaced: `rollout.kv_across_updates`.
        """
        super().__init__(url)
        self._server = JsonServer(url)
        self._end_ids = tuple(end_ids)
        self._temperature = temperature
        self._replaces_weights = replaces_weights
        self._across_updates = across_updates
        self._base_name = ""
        self._context_length = 0
        self._is_raw = False
        self._own = f"{PUBLISHED}-{uuid.uuid4().hex[:10]}"
        """Names the weights that this process brings: servers outlive runs, and several runs may share one."""
        self._num_replaced = 0
        """Times that the server's whole weights were replaced from here."""
        self._turnstile = Turnstile()

    async def facts(self) -> ServerFacts:
        await self._check_routes()
        models = await self._server.get("/v1/models", deadline_s=ASK_S)
        try:
            (base,) = [model for model in models["data"] if model.get("parent") is None][:1]
            self._base_name, self._context_length = str(base["id"]), int(base["max_model_len"])
            model = str(base.get("root") or base["id"])
        except (KeyError, TypeError, ValueError) as cause:
            raise ServiceError(f"{self.url}/v1/models does not answer as vLLM does: {str(models)[:200]}") from cause
        self._is_raw = await self._has_raw_logprobs()
        self._check_temperature(self._temperature)
        return ServerFacts(model=model, context_length=self._context_length)

    async def healthy(self) -> bool:
        try:
            await self._server.get("/health", deadline_s=ASK_S)
        except ServiceError:
            return False
        return True

    async def generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        self._check_request(request)
        if not (request.include_prompt_logprobs or request.topk_prompt_logprobs):
            async with self._turnstile.beside_others():
                return await self._sample(request, weights)
        async with self._turnstile.alone():
            scored = await self._sample(replace(request, num_samples=1), weights)
        if request.num_samples == 1:
            return scored
        async with self._turnstile.beside_others():
            plain = replace(request, include_prompt_logprobs=False, topk_prompt_logprobs=0)
            sampled = await self._sample(plain, weights)
        return replace(scored, sequences=sampled.sequences)

    async def _sample(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        body = {
            "model": weights.adapter_name or self._base_name,
            "token_ids": list(map(int, request.prompt)),
            "sampling_params": self._params(request),
        }
        if self._num_replaced:  # what older weights left in the prefix cache is not for these
            body["cache_salt"] = f"{self._own}-{self._num_replaced}"
        try:
            answer = await self._server.post(GENERATE, body, deadline_s=GENERATE_S)
        except ServerRefusedError as error:
            if error.status == 404 and weights.adapter_name is not None:  # it was started again, and lost its adapters
                raise ServerGoneError(str(error)) from error
            raise
        try:
            return self._to_response(answer, request, weights)
        except (KeyError, TypeError, ValueError, IndexError) as cause:
            raise ServerGoneError(f"{self.url}{GENERATE} does not answer as vLLM does: {cause!r}") from cause

    async def load(self, weights: ServedWeights) -> None:
        body = {"lora_name": weights.name, "lora_path": str(weights.adapter)}
        try:
            await self._server.post(LOAD, body, deadline_s=LOAD_S)
        except ServerRefusedError as error:
            if "already been loaded" not in str(error):
                raise ServiceError(f"{error}{_adapter_advice(str(error))}") from error

    async def unload(self, weights: ServedWeights) -> None:
        try:
            await self._server.post(UNLOAD, {"lora_name": weights.name}, deadline_s=ASK_S)
        except ServerRefusedError as error:
            if error.status != 404:
                raise

    async def replace_weights(self, files: Sequence[Path], version: int) -> None:
        (directory,) = {file.parent for file in files}
        mode = "wait" if self._across_updates == "end" else "keep"
        await self._server.post(f"{PAUSE}?mode={mode}", deadline_s=LOAD_S)
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            await self._server.post(RPC, body, deadline_s=LOAD_S)
            body = {"new_version": f"{self._own}-{version}"}
            await self._server.post("/update_weight_version", body, deadline_s=ASK_S)
            self._num_replaced += 1
            if self._across_updates == "recompute":
                await self._server.post(f"{RESET}?reset_running_requests=true", deadline_s=ASK_S)
        finally:
            await self._server.post(RESUME, deadline_s=ASK_S)

    async def abort_all(self) -> None:
        await self._server.post("/abort_requests", {}, deadline_s=ASK_S)

    async def close(self) -> None:
        await self._server.close()

    def _to_response(self, answer: Any, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        details = answer["usage"].get("prompt_tokens_details") or {}
        prompt, topk = _prompt_logprobs(answer.get("prompt_logprobs"), request)
        return SampleResponse(
            sequences=[self._to_sequence(choice, weights) for choice in choices],
            prompt_logprobs=prompt if request.include_prompt_logprobs else None,
            topk_prompt_logprobs=topk if request.topk_prompt_logprobs else None,
            policy_version=weights.version,
            num_cached_prompt_tokens=int(details.get("cached_tokens") or 0),
        )

    def _to_sequence(self, choice: Any, weights: ServedWeights) -> SampledSequence:
        reason, tokens = choice["finish_reason"], [int(token) for token in choice["token_ids"]]
        if reason not in ("stop", "length"):
            raise ServerGoneError(f"the server ended the request after {len(tokens)} tokens: {reason}")
        versions = self._versions(choice.get("weight_versions"), len(tokens))
        return SampledSequence(
            stop_reason=reason,
            tokens=tokens,
            logprobs=[float(drawn["logprob"]) for drawn in choice["logprobs"]["content"]],
            versions=None if weights.adapter_name is not None else versions,
        )

    def _versions(self, spans: Sequence[Mapping[str, Any]] | None, num_tokens: int) -> list[int] | None:
        """The version of each token; None where the server's own weights were never replaced from here."""
        names = [str(span["version"]) for span in spans or ()]
        others = [name for name in names if not name.startswith(f"{self._own}-")]
        if not self._replaces_weights:
            others = [name for name in others if name.startswith(f"{PUBLISHED}-")]
        if others and (self._num_replaced or not self._replaces_weights):
            raise ServerGoneError(
                f"the server at {self.url} has other weights than this run needs ({others[0]}): another run replaced "
                "them (rollout.publish=weights), or the server was started again. Start it again with the run's model, "
                "and give each run that replaces weights a server of its own"
            )
        if not names or not self._num_replaced:
            return None
        ends = [(int(name.rpartition("-")[2]), span) for name, span in zip(names, spans or (), strict=True)]
        found = [version for version, span in ends for _ in range(int(span["end"]) - int(span["start"]))]
        if len(found) != num_tokens:
            raise ValueError(f"weight_versions name {len(found)} tokens of {num_tokens}")
        return found

    async def _check_routes(self) -> None:
        described = await self._server.get("/openapi.json", deadline_s=ASK_S)
        paths = described.get("paths", {}) if isinstance(described, dict) else {}
        required = REQUIRED_FOR_WEIGHTS if self._replaces_weights else REQUIRED
        for path, advice in required.items():
            if path not in paths:
                raise ConfigError(f"the server at {self.url} has no route {path}; {advice} (docs/backends.md)")

    async def _has_raw_logprobs(self) -> bool:
        """Whether the server's logprobs leave the temperature out: half the temperature then does not spread them
        twice as far."""
        warm, cold = await asyncio.gather(*(self._spread(temperature) for temperature in (1.0, 0.5)))
        return cold < 1.5 * warm

    async def _spread(self, temperature: float) -> float:
        """How far the logprobs of the best tokens are apart."""
        params = {
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": NUM_PROBED,
            "ignore_eos": True,
            "seed": 0,
        }
        body = {"model": self._base_name, "token_ids": list(PROBE_IDS), "sampling_params": params}
        answer = await self._server.post(GENERATE, body, deadline_s=ASK_S)
        (drawn,) = answer["choices"][0]["logprobs"]["content"]
        by_rank = {int(one["rank"]): float(one["logprob"]) for one in drawn["top_logprobs"]}
        return by_rank[1] - by_rank[NUM_PROBED - 1]  # the drawn token, of whatever rank, may take the last place

    def _check_temperature(self, temperature: float) -> None:
        if self._is_raw and temperature not in (0.0, 1.0):
            raise ConfigError(
                f"the server at {self.url} gives logprobs at temperature 1, and temperature={temperature:g} was asked "
                "for; start the server with --logprobs-mode processed_logprobs"
            )

    def _check_request(self, request: SampleRequest) -> None:
        params, num_prompt = request.sampling_params, len(request.prompt)
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            raise DataError(
                "top_k, top_p and min_p are off with vLLM: its logprobs are then those of the tokens that are left, "
                "and ours are of the whole vocabulary; use the temperature to sharpen"
            )
        if not num_prompt:
            raise DataError("the prompt is empty; send at least one token")
        if self._context_length and num_prompt >= self._context_length:
            raise DataError(
                f"the prompt has {num_prompt} tokens; the server at {self.url} holds {self._context_length}, shorten "
                "it or start the server with a larger --max-model-len"
            )
        self._check_temperature(params.temperature)

    def _params(self, request: SampleRequest) -> dict[str, Any]:
        params = request.sampling_params
        room = self._context_length - len(request.prompt)
        stops = params.stop_strings()
        found: dict[str, Any] = {
            "max_tokens": min(params.max_tokens or room, room),
            "temperature": params.temperature,
            "logprobs": 0,  # of the drawn token alone
            "n": request.num_samples,
            "ignore_eos": True,  # the ends are named below, as in our engine
            "stop_token_ids": sorted(params.stop_ids(self._end_ids)),
            "detokenize": bool(stops),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if stops:
            found |= {"stop": stops, "include_stop_str_in_output": True}
        if params.seed is not None:
            found["seed"] = int(params.seed)
        if request.include_prompt_logprobs or request.topk_prompt_logprobs:
            found["prompt_logprobs"] = request.topk_prompt_logprobs
        return found


def _prompt_logprobs(
    found: Sequence[Mapping[str, Any] | None] | None, request: SampleRequest
) -> tuple[list[float | None] | None, list[list[tuple[int, float]] | None] | None]:
    """The logprob of each prompt token, and of the likeliest tokens at its place."""
    if found is None:
        return None, None
    own: list[float | None] = [None]
    best: list[list[tuple[int, float]] | None] = [None]
    for token, place in zip(request.prompt[1:], found[1:], strict=True):
        assert place is not None
        own.append(float(place[str(int(token))]["logprob"]))
        ranked = sorted(place.items(), key=lambda item: item[1]["rank"])
        best.append([(int(one), float(value["logprob"])) for one, value in ranked[: request.topk_prompt_logprobs]])
    return own, best


def _adapter_advice(words: str) -> str:
    if "lm_head" in words or "embed" in words:
        return "; leave the output head out of the adapter: model.train_unembed=false, or rollout.publish=weights"
    return "; start the server with a larger --max-lora-rank" if "rank" in words else ""
