"""The application in process, over real HTTP semantics and a real tiny engine; every test has a data directory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from turnwise.client.engines import POOL, LoadedModel
from turnwise.engine.config import EngineConfig
from turnwise.service.app import create_app
from turnwise.service.config import ServeConfig
from turnwise.service.engines import load_models
from turnwise.service.named_policies import NamedPolicy, keep_policies
from turnwise.service.service import Service
from turnwise.service.store.store import Store
from turnwise.service.wire import proto as proto_schema

ENGINE = EngineConfig(device="cpu", kv_cache_gib=0.05)
TOKENS = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="session")
def engine_held(tiny_dir: Path) -> Iterator[LoadedModel]:
    """Keeps the engine loaded between tests."""
    assert tiny_dir.is_dir()
    loaded = load_models(["tiny"], ENGINE)["tiny"]
    yield loaded
    POOL.release(loaded.worker)


class Wire:
    """A client of the wire: what the SDKs send, without their retries."""

    def __init__(self, http: httpx2.AsyncClient, service: Service, key: str | None = None) -> None:
        self.http = http
        self.service = service
        self.headers = {} if key is None else {"x-api-key": key}

    def with_key(self, key: str) -> Wire:
        return Wire(self.http, self.service, key)

    async def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        headers = {**self.headers, **options.pop("headers", {})}
        return await self.http.request(method, f"/api/v1{path}", headers=headers, **options)

    async def post(self, path: str, body: object = None, **options: Any) -> httpx2.Response:
        return await self.request("POST", path, json={} if body is None else body, **options)

    async def get(self, path: str) -> httpx2.Response:
        return await self.request("GET", path)

    async def ok(self, path: str, body: object = None) -> Any:
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def session(self) -> str:
        return (await self.ok("/create_session", {"tags": [], "sdk_version": "test"}))["session_id"]

    async def model(self, session: str | None = None, index: int = 0, **lora: Any) -> str:
        body = {
            "session_id": session or await self.session(),
            "model_seq_id": index,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": 1, **lora},
        }
        created = await self.ok("/create_model", body)
        await self.result(created)
        return created["model_id"]

    async def train(self, model: str, seq: int, tokens: list[int] | None = None, loss: str = "cross_entropy") -> Any:
        return await self.ok("/forward_backward", training_body(model, seq, tokens, loss))

    async def step(self, model: str, seq: int, rate: float = 1e-2) -> Any:
        return await self.ok("/optim_step", {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}})

    async def result(self, promise: Any, **headers: str) -> Any:
        answer = await self.post("/retrieve_future", {"request_id": promise["request_id"]}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def loss(self, model: str, seq: int) -> float:
        """The loss now, without a gradient."""
        body = training_body(model, seq)
        body["forward_input"] = body.pop("forward_backward_input")
        return (await self.result(await self.ok("/forward", body)))["metrics"]["loss:sum"]


def training_body(model: str, seq: int, tokens: list[int] | None = None, loss: str = "cross_entropy") -> Any:
    tokens = tokens or TOKENS
    number = {"dtype": "float32", "shape": [len(tokens) - 1]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [len(tokens) - 1]},
            "weights": {"data": [1.0] * (len(tokens) - 1), **number},
        },
    }
    return {
        "model_id": model,
        "seq_id": seq,
        "forward_backward_input": {"data": [datum], "loss_fn": loss},
    }


def training_proto(model: str, seq: int, tokens: list[int] | None = None) -> bytes:
    import numpy as np

    tokens = tokens or TOKENS
    message = proto_schema.message_class("ForwardBackwardRequest")(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], dtype="<i4").tobytes()
    for key, values, dtype, code in (
        ("target_tokens", tokens[1:], "<i8", proto_schema.DTYPE_INT64),
        ("weights", [1.0] * (len(tokens) - 1), "<f4", proto_schema.DTYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[key]
        tensor.dense, tensor.dtype = np.asarray(values, dtype=dtype).tobytes(), code
        tensor.shape.append(len(values))
    return message.SerializeToString()


Serve = Callable[..., AbstractAsyncContextManager[Wire]]


@pytest.fixture
def serve(engine_held: LoadedModel, tmp_path: Path) -> Serve:
    """`async with serve(autosave=2) as wire`: the service over this test's data directory; again for a restart."""
    assert not engine_held.worker.is_stopped

    @asynccontextmanager
    async def run(*, policies: Sequence[NamedPolicy] = (), **settings: Any) -> AsyncIterator[Wire]:
        data_dir = tmp_path / "data"
        settings = {"hold_s": 10.0, "engine": ENGINE, **settings}
        config = ServeConfig(models=("tiny",), data_dir=data_dir, **settings)
        kept = keep_policies(policies, data_dir)
        app = create_app(config, Store(data_dir), load_models(config.models, config.engine), kept)
        transport = httpx2.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http,
        ):
            yield Wire(http, app.state.service)

    return run
