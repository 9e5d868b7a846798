"""SGLang servers sample: token ids in, token ids and logprobs out, over SGLang's own HTTP routes.

Logprobs. SGLang returns the logprobs of the distribution that it drew from, at the sampling temperature (at 1 when
greedy), which is what a loss needs. A server that was started with SGLANG_RETURN_ORIGINAL_LOGPROB returns those at
temperature 1 instead; such a server is found out and refused where the run's temperature is another one.

Stops. A reply ends with its stop, as everywhere in turnwise. SGLang always stops at the model's end of sequence when it
is given stop ids. Where that id is not among the stops that were asked for, the reply is continued by another request.

Seeds. SGLang reads the seed of a request only where it was started with --enable-deterministic-inference.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from turnwise.backends import BackendSetup
from turnwise.backends.servers.dialect import ServedWeights, ServerDialect, ServerFacts
from turnwise.backends.servers.http import JsonServer, ServerGoneError, ServerRefusedError
from turnwise.backends.servers.launch import ServerCommand
from turnwise.backends.servers.publisher import ServerPublisher
from turnwise.backends.servers.python import check_own_server, server_python, size_arguments
from turnwise.backends.servers.served_files import read_rank
from turnwise.client.base import SamplingClient
from turnwise.errors import ConfigError, ServiceError
from turnwise.rollout.config import RolloutConfig
from turnwise.types import SampledSequence, SampleRequest, SampleResponse, SamplingParams, StopReason

CHECK_S, LOAD_S, UPDATE_S, GENERATE_S = 10.0, 120.0, 600.0, 3600.0
"""Deadlines of one call, in seconds. The fleet ends a reply that takes too long, so its own deadline is a last resort.
"""
MAX_PARTS = 32
"""Requests that one reply may take, where the server ends it before its stop."""
FILL_CONTEXT = 2**30
MODULE, ENTRY = "sglang", "sglang.launch_server"
SIZES = {
    "gpu_memory_utilization": "--mem-fraction-static",
    "max_num_seqs": "--max-running-requests",
    "tensor_parallel_size": "--tp-size",
}
"""Options of the section `rollout`, and the arguments of the server that mean the same."""
OWN_ARGUMENTS = (
    *("--model-path", "--host", "--port", "--tp-size", "--api-key"),
    *("--enable-lora", "--max-lora-rank", "--lora-target-modules"),
)
"""Arguments that the run itself depends on."""
RELEASED = ("kv_cache",)
"""What a server gives back while the trainer learns, in SGLang's words."""
MAX_LOADED = 16
"""Adapters that a server of our own keeps: versions that attempts under way may still ask for."""
RAW_VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"
RAW_TOLERANCE = 1e-4
"""Logprobs that differ by less than this are the same."""
PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: Mapping[str, PauseMode] = {"recompute": "retract", "keep": "in_place", "end": "abort"}
"""What a request under way does while the server's weights change, by `rollout.kv_across_updates`: its keys and values
are computed again with the new weights, or stay as they are, or the reply is cut off and drawn on by another request.
"""


class SglangDialect(ServerDialect):
    """Talks to one SGLang server."""

    def __init__(
        self,
        url: str,
        *,
        temperature: float = 1.0,
        kv_across_updates: str = "recompute",
        sleeps: bool = False,
        key: str = "",
    ) -> None:
        """Args:
        temperature: What the run samples at; the server is asked whether it returns logprobs at that temperature.
        sleeps: It gives memory back while the trainer learns; a server that cannot is refused.
        key: The server's API key, if it has one.
        """
        super().__init__(url)
        self._server = JsonServer(url, key=key)
        self._temperature = temperature
        self._pause_mode = PAUSE_MODES[kv_across_updates]
        self._sleeps = sleeps
        self._aborts: set[asyncio.Task[None]] = set()
        self._known: set[str] = set()
        """SGLang's names of the weights that it had when it was let in, and of those that came from here."""

    async def facts(self) -> ServerFacts:
        said = await self._server.get("/model_info", deadline_s=CHECK_S)
        if not isinstance(said, dict) or "model_path" not in said:
            raise ConfigError(f"what answers at {self.url} is no SGLang server: /model_info said {str(said)[:200]!r}")
        facts = cast("dict[str, Any]", said)
        if facts.get("is_generation") is False:
            raise ConfigError(f"the SGLang server at {self.url} serves {facts['model_path']}, which does not generate")
        self._known = {str(facts["weight_version"])} if "weight_version" in facts else set()
        await self._check_temperature()
        info = await self._info()
        if self._sleeps and not info.get("enable_memory_saver"):
            raise ConfigError(
                f"rollout.placement=colocated: the server at {self.url} cannot give its memory back; start it with "
                "--enable-memory-saver, or use rollout.placement=separate"
            )
        return ServerFacts(
            model=str(facts.get("served_model_name") or facts["model_path"]),
            context_length=_whole(info.get("context_length")) or _whole(info.get("max_req_input_len")),
            vocabulary=_whole(facts.get("vocab_size")),
        )

    async def healthy(self) -> bool:
        try:
            await self._server.get("/health", deadline_s=CHECK_S)
        except ServiceError:
            return False
        return True

    async def generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        tasks = [asyncio.create_task(self._draw(_nth(request, index), weights)) for index in range(request.num_samples)]
        try:
            replies = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        first = replies[0]
        return SampleResponse(
            sequences=[reply.to_sequence() for reply in replies],
            prompt_logprobs=first.prompt_logprobs if request.include_prompt_logprobs else None,
            topk_prompt_logprobs=first.topk_prompt_logprobs if request.topk_prompt_logprobs else None,
            num_cached_prompt_tokens=first.num_cached,
        )

    async def load(self, weights: ServedWeights) -> None:
        assert weights.adapter_name is not None
        body = {"lora_name": weights.adapter_name, "lora_path": str(weights.adapter)}
        try:
            said = await self._server.post("/load_lora_adapter", body, deadline_s=LOAD_S)
        except ServerRefusedError as error:
            if "already" in str(error):
                return
            raise
        self._check_success(said, f"load {weights.adapter_name}")

    async def unload(self, weights: ServedWeights) -> None:
        with contextlib.suppress(ServerRefusedError):  # it does not have it
            await self._server.post("/unload_lora_adapter", {"lora_name": weights.adapter_name}, deadline_s=LOAD_S)

    async def replace_weights(self, files: Sequence[Path], version: int) -> None:
        """Read the weights of a model directory; requests under way wait, and go on with the new weights."""
        directories = {file.parent for file in files}
        if len(directories) != 1:
            raise ServiceError(f"SGLang reads the weights of one directory; {len(directories)} came")
        body = {
            "model_path": str(directories.pop()),
            "weight_version": str(version),
            "flush_cache": self._pause_mode != "in_place",  # what requests under way keep cannot be flushed
        }
        await self._server.post("/pause_generation", {"mode": self._pause_mode}, deadline_s=CHECK_S)
        try:
            said = await self._server.post("/update_weights_from_disk", body, deadline_s=UPDATE_S)
            self._check_success(said, f"update the weights to version {version}")
            self._known.add(str(version))
        finally:
            await self._server.post("/continue_generation", {}, deadline_s=CHECK_S)

    async def sleep(self) -> None:
        """Give back the memory of keys and values. Weights stay: those that SGLang releases are lost."""
        await self._server.post("/release_memory_occupation", {"tags": list(RELEASED)}, deadline_s=LOAD_S)

    async def wake(self) -> None:
        await self._server.post("/resume_memory_occupation", {"tags": list(RELEASED)}, deadline_s=LOAD_S)

    async def close(self) -> None:
        for task in list(self._aborts):
            task.cancel()
        await self._server.close()

    async def _draw(self, request: SampleRequest, weights: ServedWeights) -> _Reply:
        """One reply, in as many requests as the server makes of it."""
        reply = _Reply()
        for _ in range(MAX_PARTS):
            part = await self._ask(request, weights, reply)
            is_over = reply.add(part, request, self.url)
            if is_over:
                return reply
        raise ServerGoneError(f"{self.url} ended one reply {MAX_PARTS} times before its stop")

    async def _ask(self, request: SampleRequest, weights: ServedWeights, so_far: _Reply) -> dict[str, Any]:
        name = f"turnwise-{uuid.uuid4().hex}"
        body = _to_body(request, so_far, name) | (
            {} if weights.adapter_name is None else {"lora_path": weights.adapter_name}
        )
        try:
            said = await self._server.post("/generate", body, deadline_s=GENERATE_S)
        except ServerRefusedError as error:
            if weights.adapter_name is not None and weights.adapter_name in str(error):
                raise ServerGoneError(f"{self.url} has lost the adapter {weights.adapter_name}: {error}") from error
            raise
        except asyncio.CancelledError:
            self._abort(name)
            raise
        if not isinstance(said, dict) or not isinstance(said.get("meta_info"), dict):
            raise ServerGoneError(f"{self.url}/generate returned no meta_info: {str(said)[:200]!r}")
        answer = cast("dict[str, Any]", said)
        self._check_weights(answer["meta_info"].get("weight_versions") or ())
        return answer

    def _check_weights(self, spans: Sequence[Mapping[str, Any]]) -> None:
        """Refuse replies of weights that another run loaded: this run's adapters were trained on other weights."""
        others = [str(span.get("version")) for span in spans if str(span.get("version")) not in self._known]
        if self._known and others:
            raise ServerGoneError(
                f"the server at {self.url} has other weights than when it was let in ({others[0]}): somebody replaced "
                "them. Give each run that replaces weights servers of its own"
            )

    def _abort(self, name: str) -> None:
        """End a request on the server, without waiting for it."""

        async def abort() -> None:
            with contextlib.suppress(ServiceError):
                await self._server.post("/abort_request", {"rid": name}, deadline_s=CHECK_S)

        task = asyncio.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _info(self) -> dict[str, Any]:
        """What the server says about how it was started, where it says it."""
        try:
            said = await self._server.get("/server_info", deadline_s=CHECK_S)
        except ServerRefusedError:
            return {}
        return cast("dict[str, Any]", said) if isinstance(said, dict) else {}

    async def _check_temperature(self) -> None:
        """Refuse a server whose logprobs are not those of the distribution that it draws from."""
        if self._temperature in (0.0, 1.0):
            return
        # Far from 1, so that rounding cannot hide the difference.
        drawn = await self._draw(SampleRequest([1, 2, 3], SamplingParams(max_tokens=1, temperature=2.0)), _OWN)
        scored = await self._draw(SampleRequest.scoring([1, 2, 3, drawn.tokens[0]]), _OWN)
        raw = scored.prompt_logprobs[-1] if scored.prompt_logprobs else None
        if raw is not None and abs(drawn.logprobs[0] - raw) < RAW_TOLERANCE:
            raise ConfigError(
                f"the SGLang server at {self.url} returns logprobs at temperature 1, and the run samples at "
                f"{self._temperature:g}; start it without {RAW_VARIABLE}"
            )

    def _check_success(self, said: object, what: str) -> None:
        answer = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        if answer.get("success") is True:
            return
        why = answer.get("error_message") or answer.get("message") or str(said)[:200]
        if "already" in str(why):
            return
        raise ServerRefusedError(f"{self.url} could not {what}: {why}", 200)


class SglangPublisher(ServerPublisher):
    """Publishes each version as an adapter of its own to SGLang servers."""

    def __init__(self, setup: BackendSetup) -> None:
        super().__init__(setup)
        self._rank = setup.lora_rank

    @classmethod
    def check_options(cls, rollout: RolloutConfig) -> None:
        if rollout.publish != "adapter":
            raise ConfigError(f"rollout.backend=sglang publishes adapters only; leave out publish={rollout.publish}")
        check_own_server(rollout, MODULE, own=OWN_ARGUMENTS)

    @classmethod
    def describe(cls, rollout: RolloutConfig) -> str:
        if rollout.url:
            return f"SGLang at {', '.join(rollout.url)}"
        command = [server_python(rollout), "-m", ENTRY, *size_arguments(rollout, SIZES), *rollout.server_args]
        return f"SGLang, a server that the run starts: {' '.join(command)}"

    def make_dialect(self, url: str) -> SglangDialect:
        rollout = self.setup.rollout
        return SglangDialect(
            url,
            temperature=rollout.temperature,
            kv_across_updates=rollout.kv_across_updates,
            sleeps=rollout.placement == "colocated",
            key=self.server_key,
        )

    def server_command(self) -> ServerCommand:
        environment = {"PYTHONPATH": "", RAW_VARIABLE: "0", **self.gpu_variables()}
        return ServerCommand(name="SGLang", arguments=self._arguments, environment=environment)

    async def deliver_files(self, adapter: Path | None, version: int) -> SamplingClient:
        if adapter is not None:
            self._rank = max(self._rank, read_rank(adapter))
        return await super().deliver_files(adapter, version)

    def _arguments(self, port: int) -> list[str]:
        from turnwise.engine.engine import choose_device

        setup, rollout = self.setup, self.setup.rollout
        device, dtype = choose_device(setup.engine)
        named = {
            "--model-path": str(setup.model_directory.resolve()),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--device": device.type,
            "--dtype": str(dtype).removeprefix("torch."),
            "--context-length": str(rollout.max_trajectory_tokens + 1),
            "--max-lora-rank": str(max(1, self._rank)),
            "--lora-target-modules": "all",
            "--max-loaded-loras": str(MAX_LOADED),
        }
        command = [server_python(rollout), "-m", ENTRY, *(part for pair in named.items() for part in pair)]
        command += ["--enable-memory-saver"] if rollout.placement == "colocated" else []
        return [*command, "--enable-lora", *size_arguments(rollout, SIZES), *rollout.server_args]


_OWN = ServedWeights(version=0)


@dataclass(slots=True)
class _Reply:
    """A reply while it is drawn."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    stop_reason: StopReason = "length"
    versions: list[int] = field(default_factory=list[int])
    """The version that drew each token, where the run replaces the server's own weights; else empty."""
    num_cached: int = 0
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[Sequence[tuple[int, float]] | None] | None = None

    def to_sequence(self) -> SampledSequence:
        versions = self.versions if len(set(self.versions)) > 1 else None
        return SampledSequence(self.stop_reason, self.tokens, self.logprobs, versions)

    def add(self, said: dict[str, Any], request: SampleRequest, url: str) -> bool:
        """Add what one request brought. Returns whether the reply is complete."""
        meta: dict[str, Any] = said["meta_info"]
        is_first = not self.tokens
        try:
            drawn = [(int(entry[1]), float(entry[0])) for entry in meta.get("output_token_logprobs") or ()]
            finish: dict[str, Any] = meta["finish_reason"]
            kind = str(finish["type"])
            versions = _token_versions(meta.get("weight_versions") or (), len(drawn))
            if is_first:
                self._add_prompt(meta, request)
        except (KeyError, IndexError, TypeError, ValueError) as cause:
            raise ServerGoneError(f"{url}/generate returned what is no answer of it: {str(said)[:300]}") from cause
        _check_ids(said, [token for token, _ in drawn], url)
        self.tokens += [token for token, _ in drawn]
        self.logprobs += [logprob for _, logprob in drawn]
        self.versions += versions
        if kind == "abort":
            if finish.get("status_code") is not None or not drawn:
                raise ServerGoneError(f"{url} ended the request: {finish.get('message') or 'no reason was given'}")
            return False  # somebody paused the server; the rest is drawn by another request
        if kind not in ("stop", "length"):
            raise ServerGoneError(f"{url} ended a reply with {kind!r}; expected stop or length")
        if kind == "length":
            return True
        if isinstance(finish.get("matched"), int) and not _is_asked_for(int(finish["matched"]), request):
            return len(self.tokens) >= (request.sampling_params.max_tokens or math.inf)
        self.stop_reason = "stop"
        return True

    def _add_prompt(self, meta: dict[str, Any], request: SampleRequest) -> None:
        self.num_cached = int(meta.get("cached_tokens") or 0)
        if request.include_prompt_logprobs:
            values = [entry[0] for entry in meta["input_token_logprobs"]]
            self.prompt_logprobs = [None if value is None else float(value) for value in values]
        if request.topk_prompt_logprobs:
            self.topk_prompt_logprobs = [
                None if entry is None else [(int(one[1]), float(one[0])) for one in entry]
                for entry in meta["input_top_logprobs"]
            ]


def _to_body(request: SampleRequest, so_far: _Reply, name: str) -> dict[str, Any]:
    """The body of `/generate`, which goes on where the reply so far ends."""
    params = request.sampling_params
    stop_ids = sorted(params.stop_ids(()))
    asked: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        # SGLang reads stop ids only where it does not ignore the end of sequence.
        "ignore_eos": params.stop is not None and not stop_ids,
    }
    # Without a number SGLang draws 128 tokens; it lowers one that is too large to what the context holds.
    asked["max_new_tokens"] = (params.max_tokens or FILL_CONTEXT) - len(so_far.tokens)
    if params.seed is not None:
        asked["sampling_seed"] = (params.seed + len(so_far.tokens)) % 2**31
    if stop_ids:
        asked["stop_token_ids"] = stop_ids
    if params.stop_strings():
        asked["stop"] = params.stop_strings()
    body: dict[str, Any] = {
        "rid": name,
        "input_ids": [*map(int, request.prompt), *so_far.tokens],
        "sampling_params": asked,
        "return_logprob": True,
    }
    if not so_far.tokens and (request.include_prompt_logprobs or request.topk_prompt_logprobs):
        body["logprob_start_len"] = 0
        body["top_logprobs_num"] = request.topk_prompt_logprobs
    return body


def _token_versions(spans: Sequence[Mapping[str, Any]], num_tokens: int) -> list[int]:
    """The version of each token. Empty if the server names its weights itself, because they are not the run's."""
    if not all(str(span["version"]).isdigit() for span in spans):
        return []
    found = [int(span["version"]) for span in spans for _ in range(int(span["start"]), int(span["end"]))]
    if spans and len(found) != num_tokens:
        raise ValueError(f"weight_versions name {len(found)} tokens of {num_tokens}")
    return found


def _is_asked_for(stop_id: int, request: SampleRequest) -> bool:
    """Whether the caller's stops name this id; without any, the model's end of sequence is meant."""
    named = request.sampling_params.stop_ids(())
    return stop_id in named or (request.sampling_params.stop is None and not named)


def _nth(request: SampleRequest, index: int) -> SampleRequest:
    """The request for one of several replies, with a seed of its own."""
    params = request.sampling_params
    seed = None if params.seed is None else params.seed + index
    return replace(
        request,
        num_samples=1,
        sampling_params=replace(params, seed=seed),
        include_prompt_logprobs=request.include_prompt_logprobs and index == 0,
        topk_prompt_logprobs=request.topk_prompt_logprobs if index == 0 else 0,
    )


def _check_ids(said: dict[str, Any], drawn: list[int], url: str) -> None:
    """The ids with logprobs must be the ids that were drawn; the list of plain ids may lack the stop at its end."""
    plain = said.get("output_ids")
    if isinstance(plain, list) and drawn[: len(cast("list[int]", plain))] != plain:
        raise ServerGoneError(f"{url}/generate returned ids {str(cast(object, plain))[:120]} and logprobs of others")


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
