"""How far a reader walks: the files from an HTTP `forward_backward` to its gradient, and those of a new endpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import turnwise
from turnwise.engine.worker import EngineWorker
from turnwise.service.training.operations import (
    REQUESTS,
    OperationBuilder,
    RequestType,
    TrainingModel,
    TrainingRequest,
    parse_request,
)
from turnwise.service.training.queue import Operation
from turnwise.service.wire import schemas
from turnwise.service.wire.results import JsonReply
from unit.service.conftest import Serve

SOURCE = Path(turnwise.__file__).parent
WALK = (
    "service/routes/training.py",
    "service/routes/common.py",
    "service/training/training.py",
    "service/training/operations.py",
    "service/wire/types.py",
    "service/futures.py",
    "service/training/queue.py",
    "service/training/parked_adapters.py",
    "engine/worker.py",
    "engine/engine.py",
    "engine/training/trainable.py",
    "engine/training/trainer.py",
    "engine/training/pack.py",
    "engine/training/logprobs.py",
    "engine/training/losses.py",
)
AROUND_EVERY_REQUEST = ("service/app.py", "service/metrics.py")


def files_on_stack() -> set[str]:
    found: set[str] = set()
    frame: Any = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            found.add(path.relative_to(SOURCE).as_posix())
        frame = frame.f_back
    return found


async def test_forward_backward_passes_fifteen_files_from_its_route_to_its_gradient(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: set[str] = set()

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            passed.update(files_on_stack())
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    async with serve() as wire:
        model = await wire.model()
        watch(EngineWorker, "run_steps")
        watch(torch.autograd, "backward")
        await wire.result(await wire.train(model, 1))
    assert {"service/routes/training.py", "engine/training/trainer.py"} <= passed
    assert passed <= {*WALK, *AROUND_EVERY_REQUEST}
    assert len(WALK) <= 15
    assert all((SOURCE / file).is_file() for file in WALK)


class ForgetBody(schemas.Body):
    model_id: schemas.Id
    seq_id: schemas.Seq | None = None


def forget_gradient(_: OperationBuilder, model: TrainingModel, request: TrainingRequest, request_id: str) -> Operation:
    def begin(engine: Any) -> Any:
        yield from ()
        model.adapter.load(engine).grad.zero_()

    return Operation(begin=begin, finish=lambda _: JsonReply({"type": request.kind, "by": request_id}))


async def test_a_new_training_endpoint_is_a_body_a_line_of_the_table_and_a_route(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The route is one line more; what the service does with the request, journal included, is all there."""
    monkeypatch.setitem(REQUESTS, "forget", RequestType(ForgetBody.model_validate_json, forget_gradient))  # pyright: ignore[reportArgumentType]
    async with serve(autosave=4) as wire:
        model = await wire.model()
        body = ForgetBody(model_id=model, seq_id=1).model_dump_json().encode()
        caller = wire.service.access.caller(None)
        request_id = wire.service.training.submit(caller, parse_request("forget", body))
        assert await wire.result({"request_id": request_id}) == {"type": "forget", "by": request_id}
        again = wire.service.training.submit(caller, parse_request("forget", body))
        assert again == request_id, "a number that comes again gets the promise it had"
