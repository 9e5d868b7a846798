"""A small SGLang server for tests: the routes, bodies and answers of the real one, with our own engine behind it.

Shapes are those of `tests/unit/backends/sglang_answers.json`, which a real server gave. Faults are attributes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from turnwise.client.base import SamplingClient
from turnwise.client.local import ServiceClient
from turnwise.models.store import resolve_model
from turnwise.types import ModelInput, SamplingParams

SAMPLING_PARAMS = frozenset(
    [
        *("max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "ignore_eos"),
        *("skip_special_tokens", "no_stop_trim", "sampling_seed", "n"),
    ]
)
REQUEST_FIELDS = frozenset(
    ("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path")
)


@dataclass
class SglangStub:
    """One server. `start` and `kill` may be called again and again; the address stays."""

    service: ServiceClient
    model: str = "tiny"
    name: str = "tiny"
    """What it says that it serves."""
    adapters: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """What `/generate` was asked, without probes."""
    aborted: list[str] = field(default_factory=list)
    num_asked: int = 0
    """How often it was asked what it serves."""
    num_answered: int = 0
    num_probes: int = 0
    """Answers to the three tokens that a fleet asks a server for before it sends it anything."""
    num_cached: int = 0
    num_prompt: int = 0
    fault: str = ""
    """hang, error, garbage, nan, short: what `/generate` does instead of answering."""
    load_s: float = 0.0
    draw_s: float = 0.0
    """How long loading and drawing take. What is under way ends as soon as less is set."""
    is_raw: bool = False
    """Started with SGLANG_RETURN_ORIGINAL_LOGPROB."""
    chunk: int = 0
    """Tokens that are drawn between two looks at the pause; 0: all."""
    vocab_size: int | None = None
    key: str = ""
    """Started with --api-key."""
    has_memory_saver: bool = True
    """Started with --enable-memory-saver."""
    sleeps: list[float] = field(default_factory=list)
    """When it gave its memory back."""
    never_wakes: bool = False

    def __post_init__(self) -> None:
        self._copies = tempfile.TemporaryDirectory(prefix="sglang-stub-")
        self._port = 0
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._clients: dict[str | None, SamplingClient] = {}
        self._versions = ["default"]
        self._read_from = ""
        """The directory of the newest whole weights; SGLang calls itself by it."""
        self._read: dict[str | None, list[tuple[int, ...]]] = {}
        self._is_paused = False
        self.is_asleep = False
        self.pause_mode = ""
        self._running: set[str] = set()
        self._ended: set[str] = set()
        self.eos = int(self.service.create_sampling_client(base_model=self.model).get_tokenizer().eos_token_id)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start as a new process would: nothing is loaded, nothing is cached."""
        self.adapters.clear()
        self._clients.clear()
        self._read.clear()
        self._versions, self._read_from = ["default"], ""
        self.is_asleep = self._is_paused = False
        config = uvicorn.Config(self._app(), port=self._port, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        socket = config.bind_socket()
        self._port = socket.getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [socket]}, name="sglang-stub", daemon=True
        )
        self._thread.start()
        give_up_s = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < give_up_s
            time.sleep(0.002)

    def kill(self) -> None:
        """End at once; requests under way lose their connection."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(timeout=120)
            assert not self._thread.is_alive()
            self._server = self._thread = None

    def close(self) -> None:
        self.kill()
        self._copies.cleanup()

    def lose_adapters(self) -> None:
        """As a server does that was restarted between two requests."""
        self.adapters.clear()
        self._clients.clear()

    def _app(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=self._let_in)],
            routes=[
                Route("/health", self._health),
                Route("/model_info", self._model_info),
                Route("/server_info", self._server_info),
                Route("/release_memory_occupation", self._release, methods=post),
                Route("/resume_memory_occupation", self._take_memory, methods=post),
                Route("/generate", self._generate, methods=post),
                Route("/load_lora_adapter", self._load, methods=post),
                Route("/unload_lora_adapter", self._unload, methods=post),
                Route("/abort_request", self._abort, methods=post),
                Route("/pause_generation", self._pause, methods=post),
                Route("/continue_generation", self._continue, methods=post),
                Route("/update_weights_from_disk", self._update, methods=post),
            ],
        )

    async def _let_in(self, request: Request, answer: RequestResponseEndpoint) -> Response:
        if self.key and request.url.path != "/health" and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return await answer(request)

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("")

    async def _model_info(self, _: Request) -> Response:
        self.num_asked += 1
        name = self._read_from or self.name
        said = {"model_path": name, "served_model_name": name, "is_generation": True}
        more = {} if self.vocab_size is None else {"vocab_size": self.vocab_size}
        return JSONResponse({**said, "weight_version": self._versions[-1], **more})

    async def _server_info(self, _: Request) -> Response:
        return JSONResponse({"model_path": self.name, "enable_memory_saver": self.has_memory_saver})

    async def _release(self, request: Request) -> Response:
        assert (await request.json())["tags"] == ["kv_cache"], "weights that SGLang releases are lost"
        assert not self._running, "SGLang ends here"
        assert not self.is_asleep, "SGLang ends here"
        self.is_asleep = True
        self.sleeps.append(time.monotonic())
        self._read.clear()
        return JSONResponse(None)

    async def _take_memory(self, request: Request) -> Response:
        assert (await request.json())["tags"] == ["kv_cache"]
        assert self.is_asleep, "SGLang ends here"
        while self.never_wakes and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.is_asleep = self.never_wakes
        return JSONResponse(None)

    async def _load(self, request: Request) -> Response:
        assert not self.is_asleep
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return _refused(f"LoRA with name {name} already exists", "success")
        await _wait_while(lambda waited_s: waited_s < self.load_s)
        if not (Path(path) / "adapter_model.safetensors").is_file():
            return _refused(f"cannot read {path}", "success")
        copy = self._as_own(Path(path), name)
        self._clients[name] = await self.service.create_sampling_client_async(model_path=str(copy))
        self.adapters[name] = path
        return JSONResponse(self._adapters_now())

    def _as_own(self, path: Path, name: str) -> Path:
        """A copy of PEFT files that belongs to this server's model, whatever model they were trained for."""
        copy = Path(self._copies.name) / name
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("checkpoint.json"), dirs_exist_ok=True)
        config = json.loads((copy / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(resolve_model(self.model).directory)
        (copy / "adapter_config.json").write_text(json.dumps(config))
        return copy

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _refused(f"LoRA with name {name} does not exist", "success")
        del self._clients[name]
        return JSONResponse(self._adapters_now())

    def _adapters_now(self) -> dict[str, Any]:
        said = {"rid": None, "http_worker_ipc": None, "success": True, "error_message": ""}
        return {**said, "loaded_adapters": dict(self.adapters)}

    async def _abort(self, request: Request) -> Response:
        body = await request.json()
        self.aborted.append(body["rid"])
        self._ended.add(body["rid"])
        return PlainTextResponse("")

    async def _pause(self, request: Request) -> Response:
        self.pause_mode = (await request.json()).get("mode", "abort")
        assert self.pause_mode in ("abort", "retract", "in_place")
        self._is_paused = True
        if self.pause_mode == "abort":
            self._ended.update(self._running)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: Request) -> Response:
        self._is_paused = False
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, request: Request) -> Response:
        body = await request.json()
        assert self._is_paused, "replies under way would be of half-read weights"
        if not (Path(body["model_path"]) / "model.safetensors").is_file():
            return JSONResponse({"success": False, "message": f"no weights in {body['model_path']}"}, 400)
        await _wait_while(lambda waited_s: waited_s < self.load_s)
        self._clients[None] = await self.service.create_sampling_client_async(base_model=body["model_path"])
        self._versions.append(body["weight_version"])
        self._read_from = body["model_path"]
        if body["flush_cache"]:
            self._read.pop(None, None)
        said = f"Succeeded to update model weights. Weight version updated to {body['weight_version']}."
        return JSONResponse({"success": True, "message": said, "num_paused_requests": 0})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        assert not self.is_asleep, "there is no memory to sample in"
        unknown = (set(body) - REQUEST_FIELDS) | (set(body["sampling_params"]) - SAMPLING_PARAMS)
        if unknown:
            return _refused(f"unexpected {sorted(unknown)}", "error")
        lora = body.get("lora_path")
        if lora is not None and lora not in self.adapters:
            known = f"Loaded adapters: {list(self.adapters)}."
            return _refused(f"The following requested LoRA adapters are not loaded: {lora}\n{known}", "error")
        if len(body["input_ids"]) > 3:
            self.bodies.append(body)
        name = body.get("rid") or uuid.uuid4().hex
        self._running.add(name)
        try:
            return await self._answer(name, body, request)
        finally:
            self._running.discard(name)

    async def _answer(self, name: str, body: dict[str, Any], request: Request) -> Response:
        if self.fault == "hang":
            while name not in self._ended and not await request.is_disconnected():
                await asyncio.sleep(0.01)
            return PlainTextResponse("", 500)
        if self.fault == "error":
            return JSONResponse({"error": {"message": "CUDA error: device-side assert triggered"}}, 500)
        if self.fault == "garbage":
            return PlainTextResponse("<html>gateway</html>")
        await _wait_while(lambda waited_s: waited_s < self.draw_s)
        drawn = await self._draw(name, body)
        said = await self._to_answer(name, body, drawn)
        if self.fault == "nan":
            said["meta_info"]["output_token_logprobs"][0][0] = float("nan")
        if self.fault == "short":
            said["meta_info"]["output_token_logprobs"].pop()
        self.num_answered += 1
        self.num_probes += len(body["input_ids"]) <= 3
        return Response(json.dumps(said), media_type="application/json")

    def _client(self, lora: str | None) -> SamplingClient:
        if lora not in self._clients:
            self._clients[lora] = self.service.create_sampling_client(base_model=self.model)
        return self._clients[lora]

    async def _draw(self, name: str, body: dict[str, Any]) -> _Drawn:
        asked, drawn = body["sampling_params"], _Drawn()
        left = min(asked.get("max_new_tokens", 128), 512)
        stops = set(asked.get("stop_token_ids") or ()) | {self.eos}
        client = await asyncio.to_thread(self._client, body.get("lora_path"))
        while left > 0:
            was_paused = False
            while self._is_paused and name not in self._ended:
                was_paused = True
                await asyncio.sleep(0.005)
            drawn.num_retractions += was_paused and self.pause_mode == "retract"
            if name in self._ended:
                drawn.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                return drawn
            if body.get("lora_path") is None:
                client = await asyncio.to_thread(self._client, None)
            count = min(left, self.chunk or left)
            params = SamplingParams(
                max_tokens=count,
                temperature=asked["temperature"],
                top_p=asked["top_p"],
                seed=None if "sampling_seed" not in asked else asked["sampling_seed"] + len(drawn.tokens),
                stop=list(asked.get("stop") or ()),
                stop_token_ids=[] if asked.get("ignore_eos") else sorted(stops),
            )
            prompt = ModelInput.from_ints([*body["input_ids"], *drawn.tokens])
            sequence = (await client.sample_async(prompt, 1, params)).sequences[0]
            drawn.add(list(sequence.tokens), list(sequence.logprobs or ()), self._versions[-1])
            left -= len(sequence.tokens)
            if self.chunk:
                await asyncio.sleep(0.01)
            if sequence.stop_reason == "stop":
                last = drawn.tokens[-1]
                matched = last if last in stops and not asked.get("ignore_eos") else asked["stop"][0]
                drawn.finish = {"type": "stop", "matched": matched}
                return drawn
        drawn.finish = {"type": "length", "length": len(drawn.tokens)}
        return drawn

    async def _to_answer(self, name: str, body: dict[str, Any], drawn: _Drawn) -> dict[str, Any]:
        prompt, lora = tuple(body["input_ids"]), body.get("lora_path")
        client = self._client(lora)
        num_cached = self._cached(lora, prompt, drawn.tokens)
        logprobs = drawn.logprobs
        if self.is_raw:
            scored = await client.compute_logprobs_async(ModelInput.from_ints([*prompt, *drawn.tokens]))
            logprobs = [float(value or 0.0) for value in scored[len(prompt) :]]
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": drawn.finish,
            "prompt_tokens": len(prompt),
            "weight_version": self._versions[-1],
            "num_retractions": drawn.num_retractions,
        }
        if body.get("logprob_start_len") == 0:
            scored = await client.compute_logprobs_async(ModelInput.from_ints(prompt))
            meta["input_token_logprobs"] = [[value, token, None] for value, token in zip(scored, prompt, strict=True)]
        if body.get("return_logprob"):
            pairs = zip(logprobs, drawn.tokens, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["output_token_logprobs_length"] = len(drawn.tokens)
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": len(drawn.tokens),
            "cached_tokens": num_cached,
            "weight_versions": drawn.spans,
            "cached_tokens_details": {"device": num_cached, "host": 0} if num_cached else None,
            "dp_rank": None,
            "e2e_latency": 0.1,
            "response_sent_to_client_ts": time.time(),
        }
        return {"text": "", "output_ids": drawn.tokens, "meta_info": meta}

    def _cached(self, lora: str | None, prompt: tuple[int, ...], reply: list[int]) -> int:
        """The longest beginning of the prompt that this server has read before, as its radix cache would find it."""
        known = self._read.setdefault(lora, [])
        best = max((_common(prompt[:-1], one) for one in known), default=0)
        known.append((*prompt, *reply))
        if len(prompt) > 3:
            self.num_cached += best
            self.num_prompt += len(prompt)
        return best


@dataclass
class _Drawn:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish: dict[str, Any] = field(default_factory=dict)
    num_retractions: int = 0

    def add(self, tokens: list[int], logprobs: list[float], version: str) -> None:
        start = len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        if self.spans and self.spans[-1]["version"] == version:
            self.spans[-1]["end"] = len(self.tokens)
        else:
            self.spans.append({"version": version, "start": start, "end": len(self.tokens)})


@contextmanager
def sglang_stubs(count: int, data_dir: Path, model: str = "tiny") -> Iterator[list[SglangStub]]:
    """Servers that run; they have ended, with their threads, when the block is left."""
    with ServiceClient(data_dir=data_dir) as service:
        stubs = [SglangStub(service, model) for _ in range(count)]
        try:
            for stub in stubs:
                stub.start()
            yield stubs
        finally:
            for stub in stubs:
                stub.close()


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


async def _wait_while(is_early: Callable[[float], bool]) -> None:
    begun_s = time.monotonic()
    while is_early(time.monotonic() - begun_s):
        await asyncio.sleep(0.01)


def _refused(message: str, kind: str) -> Response:
    if kind == "success":
        return JSONResponse({"success": False, "error_message": message, "loaded_adapters": {}}, 400)
    return JSONResponse({"error": {"message": message}}, 400)
