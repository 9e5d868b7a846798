"""SGLang servers sample: token ids in, token ids and logprobs out, over SGLang's own HTTP routes.

Logprobs. SGLang returns the logprobs of the distribution that it drew from, at the sampling temperature (at 1 when
greedy), which is what a loss needs. A server that was started with SGLANG_RETURN_ORIGINAL_LOGPROB returns those at
temperature 1 instead; such a server is found out and refused where the run's temperature is another one.

Stops. A reply ends with its stop, as everywhere in turnwise. SGLang always stops at the model's end of sequence when it
is given stop ids. Where that id is not among the stops that were asked for, the reply is continued by another request.

Seeds. SGLang reads the seed of a request only where it was started with --enable-deterministic-inference.

Whole weights. SGLang reads them from a directory while its requests are retracted: their keys and values are dropped,
so is its prefix cache, and they are read again by the new weights. Every token says which weights drew it, by the name
that the update gave them.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from turnwise.backends import BackendSetup
from turnwise.backends.servers.dialect import ServedWeights, ServerDialect, ServerFacts
from turnwise.backends.servers.http import JsonServer, ServerGoneError, ServerRefusedError
from turnwise.backends.servers.launch import ServerCommand
from turnwise.backends.servers.publisher import PREFIX, ServerPublisher
from turnwise.backends.servers.python import check_own_server, given_value, server_python, size_arguments
from turnwise.backends.servers.sglang_replies import ReplyInParts, to_body
from turnwise.backends.servers.turnstile import Turnstile
from turnwise.errors import ConfigError, ServiceError
from turnwise.rollout.config import RolloutConfig
from turnwise.types import SampleRequest, SampleResponse, SamplingParams

CHECK_S, LOAD_S, UPDATE_S, GENERATE_S = 10.0, 120.0, 3600.0, 3600.0
"""Deadlines of one call, in seconds. The fleet has shorter ones for a reply and for whole weights."""
MAX_PARTS = 32
"""Requests that one reply may take, where the server ends it before its stop."""
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


class SglangDialect(ServerDialect):
    """Talks to one SGLang server."""

    def __init__(
        self,
        url: str,
        *,
        temperature: float = 1.0,
        replaces_weights: bool = False,
        finishes_replies: bool = False,
        sleeps: bool = False,
        key: str = "",
    ) -> None:
        """Args:
        temperature: What the run samples at; the server is asked whether it returns logprobs at that temperature.
        replaces_weights: Whole weights are published, not adapters.
        finishes_replies: Replies under way are finished before weights are replaced, not read again by the new ones.
        sleeps: It gives memory back while the trainer learns; a server that cannot is refused.
        key: The server's API key, if it has one.
        """
        super().__init__(url)
        self._server = JsonServer(url, key=key)
        self._temperature = temperature
        self._replaces_weights = replaces_weights
        self._finishes_replies = finishes_replies
        self._sleeps = sleeps
        self._aborts: set[asyncio.Task[None]] = set()
        self._turnstile = Turnstile()
        self._model = ""
        self._own = f"turnwise-{uuid.uuid4().hex[:10]}"
        """Begins the names of the weights that come from here: a server outlives runs, and several may share one."""
        self._versions: dict[str, int | None] = {}
        """The version of weights, by SGLang's names for them; None for those that it had when it was let in."""

    async def facts(self) -> ServerFacts:
        said = await self._server.get("/model_info", deadline_s=CHECK_S)
        if not isinstance(said, dict) or "model_path" not in said:
            raise ConfigError(f"what answers at {self.url} is no SGLang server: /model_info said {str(said)[:200]!r}")
        facts = cast("dict[str, Any]", said)
        if facts.get("is_generation") is False:
            raise ConfigError(f"the SGLang server at {self.url} serves {facts['model_path']}, which does not generate")
        self._note_weights(str(facts.get("weight_version", "")))
        await self._check_temperature()
        info = await self._info()
        if self._sleeps and not info.get("enable_memory_saver"):
            raise ConfigError(
                f"rollout.placement=colocated: the server at {self.url} cannot give its memory back; start it with "
                "--enable-memory-saver, or use rollout.placement=separate"
            )
        return ServerFacts(
            model=self._name_model(str(facts.get("served_model_name") or facts["model_path"])),
            context_length=_whole(info.get("context_length")) or _whole(info.get("max_req_input_len")),
            vocabulary=_whole(facts.get("vocab_size")),
        )

    async def healthy(self) -> bool:
        try:
            await self._server.get("/health", deadline_s=CHECK_S)
        except ServiceError:
            return False
        return True

    def _name_model(self, said: str) -> str:
        """The model's name. SGLang calls itself by the last directory that it read weights from."""
        if not (self._replaces_weights and self._model and Path(said).name.startswith(PREFIX)):
            self._model = said
        return self._model

    async def generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        async with self._turnstile.beside_others():
            return await self._generate(request, weights)

    async def _generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
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
            self._check_success(said, f"load {weights.adapter_name}")
        except ServerRefusedError as error:
            if "already" not in str(error):
                raise

    async def unload(self, weights: ServedWeights) -> None:
        with contextlib.suppress(ServerRefusedError):  # it does not have it
            await self._server.post("/unload_lora_adapter", {"lora_name": weights.adapter_name}, deadline_s=LOAD_S)

    async def replace_weights(self, files: Sequence[Path], version: int) -> None:
        """Read the weights of a model directory; requests under way wait, and go on with the new weights."""
        directories = {file.parent for file in files}
        if len(directories) != 1:
            raise ServiceError(f"SGLang reads the weights of one directory; {len(directories)} came")
        async with self._turnstile.alone() if self._finishes_replies else contextlib.nullcontext():
            await self._read_weights(directories.pop(), version)

    async def _read_weights(self, directory: Path, version: int) -> None:
        name = f"{self._own}-{version}"
        body = {"model_path": str(directory), "weight_version": name, "flush_cache": True}
        await self._server.post("/pause_generation", {"mode": "retract"}, deadline_s=CHECK_S)
        try:
            said = await self._server.post("/update_weights_from_disk", body, deadline_s=UPDATE_S)
            self._check_success(said, f"update the weights to version {version}")
            own = {known: number for known, number in self._versions.items() if number is not None}
            self._versions = {**own, name: version}
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

    async def _draw(self, request: SampleRequest, weights: ServedWeights) -> ReplyInParts:
        """One reply, in as many requests as the server makes of it."""
        reply = ReplyInParts()
        for _ in range(MAX_PARTS):
            part = await self._ask(request, weights, reply)
            is_over = reply.add(part, request, self._find_versions, self.url)
            if is_over:
                return reply
        raise ServerGoneError(f"{self.url} ended one reply {MAX_PARTS} times before its stop")

    async def _ask(self, request: SampleRequest, weights: ServedWeights, so_far: ReplyInParts) -> dict[str, Any]:
        name = f"turnwise-{uuid.uuid4().hex}"
        body = to_body(request, so_far, name) | (
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
        return cast("dict[str, Any]", said)

    def _note_weights(self, name: str) -> None:
        """Note the weights that the server has when it is let in. Adapters belong to the first ones for ever."""
        if not name:
            self._versions = {}
        elif self._replaces_weights or not self._versions:
            self._versions = {name: None}
        elif name not in self._versions:
            raise ConfigError(
                f"the server at {self.url} has other weights than when it was let in ({name}): somebody replaced them. "
                "Start it again with the run's model"
            )

    def _find_versions(self, spans: Sequence[Mapping[str, Any]], num_tokens: int) -> list[int]:
        """The version of each token; none where adapters are published. Refuse what weights of somebody else drew."""
        names = [str(span["version"]) for span in spans]
        others = [name for name in names if name not in self._versions]
        if self._versions and others:
            raise ServerGoneError(
                f"the server at {self.url} has other weights than when it was let in ({others[0]}): somebody replaced "
                "them. Give each run that replaces weights servers of its own"
            )
        if all(number is None for number in self._versions.values()):
            return []
        counts = [int(span["end"]) - int(span["start"]) for span in spans]
        if sum(counts) != num_tokens:
            raise ServerGoneError(
                f"the server at {self.url} drew {num_tokens} tokens and says of {sum(counts)} which weights drew them; "
                "with rollout.publish=weights it has to say so of all"
            )
        drawn = [self._versions[name] for name, count in zip(names, counts, strict=True) for _ in range(count)]
        return [version for version in drawn if version is not None]

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
        raise ServerRefusedError(f"{self.url} could not {what}: {why}", 200)


class SglangPublisher(ServerPublisher):
    """Publishes to SGLang servers: each version as an adapter of its own, or as whole weights."""

    takes_full_weights = True

    def __init__(self, setup: BackendSetup) -> None:
        super().__init__(setup)
        self.dtype = given_value(setup.rollout.server_args, "--dtype")

    @classmethod
    def check_options(cls, rollout: RolloutConfig) -> None:
        if rollout.publish == "weights" and rollout.kv_across_updates == "keep":
            raise ConfigError(
                "rollout.kv_across_updates=keep with rollout.publish=weights: SGLang would keep prefixes that older "
                "weights left in its cache, and read them for new attempts too; use recompute or end, or "
                "rollout.publish=adapter"
            )
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
            replaces_weights=rollout.publish == "weights",
            finishes_replies=rollout.kv_across_updates == "end",
            sleeps=rollout.placement == "colocated",
            key=self.server_key,
        )

    def server_command(self) -> ServerCommand:
        environment = {"PYTHONPATH": "", RAW_VARIABLE: "0", **self.gpu_variables()}
        return ServerCommand(name="SGLang", arguments=self._arguments, environment=environment)

    def _arguments(self, port: int) -> list[str]:
        from turnwise.engine.engine import choose_device

        setup, rollout = self.setup, self.setup.rollout
        device, dtype = choose_device(setup.engine)
        named = {
            "--model-path": str(self.start_directory.resolve()),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--device": device.type,
            "--dtype": str(dtype).removeprefix("torch."),
            "--context-length": str(rollout.max_trajectory_tokens + 1),
        }
        switches = ["--enable-memory-saver"] if rollout.placement == "colocated" else []
        if rollout.publish == "adapter":
            named |= {"--max-lora-rank": str(max(1, self.largest_rank)), "--lora-target-modules": "all"}
            named["--max-loaded-loras"] = str(MAX_LOADED)
            switches.append("--enable-lora")
        command = [server_python(rollout), "-m", ENTRY, *(part for pair in named.items() for part in pair)]
        return [*command, *switches, *size_arguments(rollout, SIZES), *rollout.server_args]


_OWN = ServedWeights(version=0)


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


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
