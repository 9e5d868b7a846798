"""What a vLLM is asked, and what its answers mean: token ids in, token ids and logprobs out, adapters and weights.

Logprobs are those of the distribution that was sampled from: with `--logprobs-mode processed_logprobs` vLLM divides by
the temperature first, and a greedy reply has its logprobs at temperature 1, as ours do. A vLLM with raw logprobs is
right at temperature 1 alone, and is refused otherwise.

On a CPU, vLLM gives a request without an adapter the weights of whatever adapter has its last slot, loaded by this run
or by another. So a request for the model itself names a blank adapter wherever others may have theirs: one that changes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwise.backends.servers.dialect import ServedWeights, ServerDialect, ServerFacts
from turnwise.backends.servers.http import ServerGoneError, ServerRefusedError
from turnwise.backends.servers.turnstile import Turnstile
from turnwise.backends.servers.vllm_calls import (
    GENERATE,
    INIT_TRANSFER,
    LOAD,
    PAUSE,
    RPC,
    SLEEP,
    VllmCalls,
    VllmHttp,
    VllmModel,
)
from turnwise.backends.servers.vllm_transfer import init_ipc, send_by_ipc
from turnwise.client.shared_weights import SharedWeights
from turnwise.errors import ConfigError, DataError, ServiceError
from turnwise.types import SampledSequence, SampleRequest, SampleResponse

PUBLISHED = "turnwise"
"""Begins the name of every version of whole weights that a run brings."""
PROBE_IDS = (1, 2, 3, 4)
FLOOR = -9999.0
"""What vLLM says for a logprob that is not finite, and for one that it does not have."""
NUM_PROBED = 5
"""Best tokens whose logprobs tell whether the server heeds the temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmUse:
    """How a run uses a vLLM."""

    end_ids: Sequence[int]
    """The model's end-of-sequence ids; a request that names no stop of its own stops at them."""
    temperature: float = 1.0
    """What the run samples with; a vLLM that cannot say the logprobs of it is refused."""
    replaces_weights: bool = False
    """Whole weights are published, not adapters."""
    reads_memory: bool = False
    """Whole weights come out of the trainer's memory, not from files."""
    across_updates: str = "recompute"
    """What happens to requests under way when weights are replaced: `rollout.kv_across_updates`."""
    sleeps: bool = False
    """It gives its memory back while the trainer learns."""
    write_blank: Callable[[], Path] | None = None
    """Writes an adapter that changes nothing, returns its path; None if no other process can load adapters there."""


class VllmDialect(ServerDialect):
    """Talks to one vLLM: a server at an address, or whatever `calls` lead to."""

    def __init__(self, url: str, use: VllmUse, calls: VllmCalls | None = None) -> None:
        super().__init__(url)
        self._use = use
        self._calls = calls or VllmHttp(self.url)
        self._model: VllmModel | None = None
        self._is_raw = False
        self._own = f"{PUBLISHED}-{uuid.uuid4().hex[:10]}"
        """Names the weights that this process brings: servers outlive runs, and several runs may share one."""
        self._num_replaced = 0
        """Times that the whole weights were replaced from here."""
        self._first_weights: str | None = None
        """vLLM's name of the weights that it had when it was let in for the first time. Adapters belong to them."""
        self._turnstile = Turnstile()
        """Lets a prompt be scored alone. A vLLM that serves adapters scores a prompt with one adapter per request of
        its batch, so a prompt that is scored beside other requests ends the server ("einsum(): subscript b ..."), or
        gets the adapter of another request."""
        self._blank: asyncio.Task[str] | None = None
        """Loads the blank adapter; its result is the adapter's name."""

    async def facts(self) -> ServerFacts:
        use = self._use
        needed = [GENERATE, RPC, PAUSE] if use.replaces_weights else [GENERATE, LOAD]
        needed += [SLEEP] if use.sleeps else []
        needed += [INIT_TRANSFER] if use.reads_memory else []
        self._model = await self._calls.describe(needed)
        if use.reads_memory:
            await init_ipc(self._calls)
        self._blank = None  # it may be another process than before
        self._is_raw = await self._has_raw_logprobs()
        self._check_temperature(use.temperature)
        return ServerFacts(model=self._model.source, context_length=self._model.context_length)

    async def healthy(self) -> bool:
        return await self._calls.is_healthy()

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
            "model": weights.adapter_name or await self._own_name(),
            "token_ids": list(map(int, request.prompt)),
            "sampling_params": self._params(request),
        }
        if self._num_replaced:  # what older weights left in the prefix cache is not for these
            body["cache_salt"] = f"{self._own}-{self._num_replaced}"
        try:
            answer = await self._calls.generate(body)
        except ServerRefusedError as error:
            if error.status == 404 and body["model"] != self._found.name:  # it was started again: adapters are lost
                raise ServerGoneError(str(error)) from error
            raise
        try:
            return self._to_response(answer, request, weights)
        except (KeyError, TypeError, ValueError, IndexError) as cause:
            raise ServerGoneError(f"{self.url}{GENERATE} does not answer as vLLM does: {cause!r}") from cause

    @property
    def _found(self) -> VllmModel:
        assert self._model is not None, "the fleet asks for facts first"
        return self._model

    async def _own_name(self) -> str:
        """How a request asks for the model itself, without an adapter."""
        model, write = self._found, self._use.write_blank
        if write is None or not model.takes_adapters:
            return model.name
        if self._blank is None or (self._blank.done() and (self._blank.cancelled() or self._blank.exception())):
            self._blank = asyncio.create_task(self._load_blank(write))
        return await asyncio.shield(self._blank)

    async def _load_blank(self, write: Callable[[], Path]) -> str:
        directory = await asyncio.to_thread(write)
        await self._calls.load(directory.name, directory)
        return directory.name

    async def load(self, weights: ServedWeights) -> None:
        assert weights.adapter is not None
        try:
            await self._calls.load(weights.adapter.name, weights.adapter)
        except ServerRefusedError as error:
            raise ServiceError(f"{error}{_adapter_advice(str(error))}") from error

    async def unload(self, weights: ServedWeights) -> None:
        assert weights.adapter is not None
        await self._calls.unload(weights.adapter.name)

    async def replace_weights(self, files: Sequence[Path], version: int) -> None:
        (directory,) = {file.parent for file in files}
        async with self._replacing(version):
            await self._calls.reload(directory)

    async def receive_weights(self, shared: SharedWeights, version: int) -> None:
        async with shared.reading() as chunks, self._replacing(version):
            await send_by_ipc(self._calls, chunks)

    @contextlib.asynccontextmanager
    async def _replacing(self, version: int) -> AsyncIterator[None]:
        """Inside, requests are paused and the whole weights may change; afterwards they have the version's name."""
        calls, choice = self._calls, self._use.across_updates
        await calls.pause("wait" if choice == "end" else "keep")
        try:
            yield
            await calls.name_weights(f"{self._own}-{version}")
            self._num_replaced += 1
            if choice == "recompute":
                await calls.recompute_requests()
        finally:
            await calls.resume()

    async def sleep(self) -> None:
        await self._calls.sleep()

    async def wake(self) -> None:
        await self._calls.wake()

    async def close(self) -> None:
        blank, self._blank = self._blank, None
        if blank is not None and blank.done() and not blank.cancelled() and blank.exception() is None:
            with contextlib.suppress(ServiceError):
                await self._calls.unload(blank.result())
        await self._calls.close()

    def _to_response(self, answer: Any, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        details = answer["usage"].get("prompt_tokens_details") or {}
        prompt, topk = _prompt_logprobs(answer.get("prompt_logprobs"), request, self.url)
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
        versions = self._versions(choice.get("weight_versions") or (), len(tokens))
        return SampledSequence(
            stop_reason=reason,
            tokens=tokens,
            logprobs=[_logprob(drawn, self.url) for drawn in choice["logprobs"]["content"]],
            versions=None if weights.adapter_name is not None else versions,
        )

    def _versions(self, spans: Sequence[Mapping[str, Any]], num_tokens: int) -> list[int] | None:
        """The version of each token; None where the server's own weights were never replaced from here."""
        names = [str(span["version"]) for span in spans]
        others = [name for name in names if not self._is_of_run(name)]
        if others:
            raise ServerGoneError(
                f"the server at {self.url} has other weights than this run needs ({others[0]}): another run replaced "
                "them (rollout.publish=weights), or the server was started again. Start it again with the run's model, "
                "and give each run that replaces weights a server of its own"
            )
        if not self._num_replaced:
            return None
        ends = [(int(name.rpartition("-")[2]), span) for name, span in zip(names, spans, strict=True)]
        found = [version for version, span in ends for _ in range(int(span["end"]) - int(span["start"]))]
        if len(found) != num_tokens:
            raise ValueError(f"weight_versions name {len(found)} tokens of {num_tokens}")
        return found

    def _is_of_run(self, name: str) -> bool:
        """Whether weights of this name may draw for the run."""
        if self._use.replaces_weights:
            return not self._num_replaced or name.startswith(f"{self._own}-")
        return self._first_weights in (None, name) and not name.startswith(f"{PUBLISHED}-")

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
        body = {"model": self._found.name, "token_ids": list(PROBE_IDS), "sampling_params": params}
        (choice,) = (await self._calls.generate(body))["choices"]
        names = [str(span["version"]) for span in choice.get("weight_versions") or ()]
        self._first_weights = self._first_weights or next(iter(names), None)
        (drawn,) = choice["logprobs"]["content"]
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
        most = self._found.context_length
        if num_prompt >= most:
            raise DataError(
                f"the prompt has {num_prompt} tokens; the server at {self.url} holds {most}, shorten "
                "it or start the server with a larger --max-model-len"
            )
        self._check_temperature(params.temperature)

    def _params(self, request: SampleRequest) -> dict[str, Any]:
        params = request.sampling_params
        room = self._found.context_length - len(request.prompt)
        stops = params.stop_strings()
        found: dict[str, Any] = {
            "max_tokens": min(params.max_tokens or room, room),
            "temperature": params.temperature,
            "logprobs": 0,  # of the drawn token alone
            "n": request.num_samples,
            "ignore_eos": True,  # the ends are named below, as in our engine
            "stop_token_ids": sorted(params.stop_ids(self._use.end_ids)),
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


def _logprob(found: Mapping[str, Any], url: str) -> float:
    """A token's logprob; one that vLLM replaced by a number of its own blames the server."""
    value = float(found["logprob"])
    if value <= FLOOR:
        raise ServerGoneError(f"{url} returned a logprob of {value:g}: it is not finite, or the server has none")
    return value


def _prompt_logprobs(
    found: Sequence[Mapping[str, Any] | None] | None, request: SampleRequest, url: str
) -> tuple[list[float | None] | None, list[list[tuple[int, float]] | None] | None]:
    """The logprob of each prompt token, and of the likeliest tokens at its place."""
    if found is None:
        return None, None
    own: list[float | None] = [None]
    best: list[list[tuple[int, float]] | None] = [None]
    for token, place in zip(request.prompt[1:], found[1:], strict=True):
        assert place is not None
        own.append(_logprob(place[str(int(token))], url))
        ranked = sorted(place.items(), key=lambda item: item[1]["rank"])
        best.append([(int(one), float(value["logprob"])) for one, value in ranked[: request.topk_prompt_logprobs]])
    return own, best


def _adapter_advice(words: str) -> str:
    if "lm_head" in words or "embed" in words:
        return "; leave the output head out of the adapter: model.train_unembed=false, or rollout.publish=weights"
    return "; start the server with a larger --max-lora-rank" if "rank" in words else ""
