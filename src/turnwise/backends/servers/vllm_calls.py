"""What turnwise asks of one vLLM, and how it is asked over HTTP.

`VllmDialect` decides what is asked and what an answer means. `VllmCalls` carries it: to a server (`VllmHttp`, here), or
to an engine of this process (`backends/vllm_in_process.py`). Bodies and answers are those of vLLM's route for token
ids, `/inference/v1/generate`, on both ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.backends.servers.http import JsonServer, ServerGoneError, ServerRefusedError
from turnwise.errors import ConfigError, ServiceError

GENERATE, LOAD, UNLOAD = "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RPC, PAUSE, RESUME, RESET = "/collective_rpc", "/pause", "/resume", "/reset_prefix_cache"
SLEEP, WAKE, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
INIT_TRANSFER, START_UPDATE = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH_UPDATE = "/update_weights", "/finish_weight_update"
DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1"
ADVICE: Mapping[str, str] = {
    GENERATE: "start the server with --enable-scale-out",
    LOAD: "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    RPC: DEV_MODE,
    PAUSE: DEV_MODE,
    SLEEP: f"{DEV_MODE} and --enable-sleep-mode",
    INIT_TRANSFER: DEV_MODE,
}
"""Routes that a run may need, and how a server gets them."""
ASK_S, LOAD_S, UPDATE_S, GENERATE_S = 30.0, 300.0, 3600.0, 3600.0
"""Deadlines: for facts and switches, for adapters and memory, for whole weights, and for a reply (the fleet has shorter
ones for these two)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmModel:
    """What a vLLM says that it serves."""

    name: str
    """The name by which requests ask for the model itself."""
    source: str
    """The path or name that it was loaded from."""
    context_length: int
    takes_adapters: bool


class VllmCalls(ABC):
    """The calls of one vLLM. Each has a deadline and raises `ServerGoneError` or `ServerRefusedError`."""

    def __init__(self, url: str) -> None:
        self.url = url
        """The address, which messages name."""

    @abstractmethod
    async def describe(self, needed: Collection[str]) -> VllmModel:
        """Ask what is served; refuse a vLLM that lacks one of the `needed` routes (keys of `ADVICE`)."""

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Say whether it answers now; never raises."""

    @abstractmethod
    async def generate(self, body: Mapping[str, Any]) -> Any:
        """Sample: the body of vLLM's route for token ids, and its answer. Cancelling ends the request."""

    @abstractmethod
    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter under a name; one that is there already stays."""

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Forget an adapter. It is no error if vLLM has none of that name."""

    @abstractmethod
    async def pause(self, mode: str) -> None:
        """Stop drawing tokens, with requests under way frozen (`keep`) or finished first (`wait`)."""

    @abstractmethod
    async def reload(self, directory: Path) -> None:
        """Read the whole weights of a model directory."""

    @abstractmethod
    async def init_transfer(self, settings: Mapping[str, Any]) -> None:
        """Say how weights will come out of another process's memory; refused by a vLLM that was not started for it."""

    @abstractmethod
    async def start_update(self) -> None:
        """Get ready for new weights, which come in parts."""

    @abstractmethod
    async def update(self, part: Mapping[str, Any]) -> None:
        """Read one part; returns when it was copied."""

    @abstractmethod
    async def finish_update(self) -> None:
        """Use the new weights."""

    @abstractmethod
    async def name_weights(self, name: str) -> None:
        """Give the weights that are there now a name; tokens carry it from now on."""

    @abstractmethod
    async def recompute_requests(self) -> None:
        """Read requests under way again when they go on."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on drawing tokens."""

    @abstractmethod
    async def sleep(self) -> None:
        """Give the device's memory back; weights and adapters are kept in the host's memory."""

    @abstractmethod
    async def wake(self) -> None:
        """Take the device's memory again."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection to vLLM."""


class VllmHttp(VllmCalls):
    """Calls a vLLM server over HTTP."""

    def __init__(self, url: str, *, key: str = "") -> None:
        super().__init__(url)
        self._server = JsonServer(url, key=key)

    async def describe(self, needed: Collection[str]) -> VllmModel:
        described = await self._server.get("/openapi.json", deadline_s=ASK_S)
        paths = described.get("paths", {}) if isinstance(described, dict) else {}
        for path in needed:
            if path not in paths:
                raise ConfigError(f"the server at {self.url} has no route {path}; {ADVICE[path]} (docs/backends.md)")
        if SLEEP in needed:
            await self._check_sleep_mode()
        models = await self._server.get("/v1/models", deadline_s=ASK_S)
        try:
            base = next(model for model in models["data"] if model.get("parent") is None)
            return VllmModel(
                name=str(base["id"]),
                source=str(base.get("root") or base["id"]),
                context_length=int(base["max_model_len"]),
                takes_adapters=LOAD in paths,
            )
        except (KeyError, TypeError, ValueError, StopIteration) as cause:
            raise ServiceError(f"{self.url}/v1/models does not answer as vLLM does: {str(models)[:200]}") from cause

    async def is_healthy(self) -> bool:
        try:
            await self._server.get("/health", deadline_s=ASK_S)
        except ServiceError:
            return False
        return True

    async def generate(self, body: Mapping[str, Any]) -> Any:
        return await self._server.post(GENERATE, body, deadline_s=GENERATE_S)

    async def load(self, name: str, directory: Path) -> None:
        try:
            await self._server.post(LOAD, {"lora_name": name, "lora_path": str(directory)}, deadline_s=LOAD_S)
        except ServerRefusedError as error:
            if "already been loaded" not in str(error):
                raise
        except ServerGoneError as error:
            if error.status != 500:
                raise
            raise ServerRefusedError(str(error), 500) from error  # it is well, and cannot use these files

    async def unload(self, name: str) -> None:
        try:
            await self._server.post(UNLOAD, {"lora_name": name}, deadline_s=ASK_S)
        except ServerRefusedError as error:
            if error.status != 404:
                raise

    async def pause(self, mode: str) -> None:
        await self._server.post(f"{PAUSE}?mode={mode}", deadline_s=UPDATE_S)

    async def reload(self, directory: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._server.post(RPC, body, deadline_s=UPDATE_S)

    async def init_transfer(self, settings: Mapping[str, Any]) -> None:
        await self._server.post(INIT_TRANSFER, {"init_info": dict(settings)}, deadline_s=LOAD_S)

    async def start_update(self) -> None:
        await self._server.post(START_UPDATE, deadline_s=LOAD_S)

    async def update(self, part: Mapping[str, Any]) -> None:
        await self._server.post(UPDATE, {"update_info": dict(part)}, deadline_s=LOAD_S)

    async def finish_update(self) -> None:
        await self._server.post(FINISH_UPDATE, deadline_s=LOAD_S)

    async def name_weights(self, name: str) -> None:
        await self._server.post("/update_weight_version", {"new_version": name}, deadline_s=ASK_S)

    async def recompute_requests(self) -> None:
        await self._server.post(f"{RESET}?reset_running_requests=true", deadline_s=ASK_S)

    async def resume(self) -> None:
        await self._server.post(RESUME, deadline_s=ASK_S)

    async def sleep(self) -> None:
        await self._server.post(f"{SLEEP}?level=1&mode=wait", deadline_s=LOAD_S)
        await self._check_sleeping(is_wanted=True)

    async def wake(self) -> None:
        await self._server.post(WAKE, deadline_s=LOAD_S)
        await self._check_sleeping(is_wanted=False)

    async def close(self) -> None:
        await self._server.close()

    async def _check_sleep_mode(self) -> None:
        """Refuse a server that would say that it sleeps, and keep its memory."""
        said = await self._server.get("/server_info?config_format=json", deadline_s=ASK_S)
        try:
            can_sleep = bool(said["vllm_config"]["model_config"]["enable_sleep_mode"])
        except (KeyError, TypeError) as cause:
            raise ServiceError(f"{self.url}/server_info does not answer as vLLM does: {str(said)[:200]}") from cause
        if not can_sleep:
            raise ConfigError(
                f"rollout.placement=colocated: the server at {self.url} cannot sleep; start it with "
                "--enable-sleep-mode, on a GPU, or use rollout.placement=separate"
            )

    async def _check_sleeping(self, *, is_wanted: bool) -> None:
        said = await self._server.get(IS_SLEEPING, deadline_s=ASK_S)
        if not isinstance(said, dict) or said.get("is_sleeping") is not is_wanted:
            state = "sleeps" if is_wanted else "is awake"
            raise ServerGoneError(f"{self.url} says that it {state}, and {IS_SLEEPING} says {str(said)[:100]}")
