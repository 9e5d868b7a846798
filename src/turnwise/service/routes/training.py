"""Training: models, forward_backward, optim_step, saving and loading."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from turnwise.errors import TurnwiseError
from turnwise.service.access import Caller
from turnwise.service.failures import HttpFailure, not_found
from turnwise.service.routes.common import (
    PREFIX,
    CallerDep,
    ServiceDep,
    documented,
    is_local,
    promised,
    read_body,
)
from turnwise.service.service import Service
from turnwise.service.store.store import KIND_KEY, OwnedCheckpointRow
from turnwise.service.training.operations import TrainingRequest, parse_request, sender_of
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire
from turnwise.service.wire.results import JsonReply
from turnwise.service.wire.screen import InvalidBodyError

router = APIRouter(prefix=PREFIX, tags=["training"])

BIG_BODY = 1 << 16
"""Bodies of at least this size are parsed in a thread."""
_LARGE_SCHEMAS = {
    "forward_backward.json": schemas.ForwardBackwardBody,
    "forward.json": schemas.ForwardBody,
    "reverse_kl": schemas.ReverseKlBody,
}
"""JSON requests whose bodies may be large; `Gate` bounds the others."""


async def submit(service: Service, caller: Caller, request: Request, kind: str) -> JSONResponse:
    """Read, check and queue one training request. A refused request still uses its sequence number."""
    body = await read_body(request, service.config.max_body_bytes)
    try:
        schema = _LARGE_SCHEMAS.get(kind)
        if schema is not None:
            await service.screen.check(schema, body)
        elif kind == "forward_backward.proto":
            await service.screen.check_protobuf(body)
        parsed = (
            await asyncio.to_thread(parse_request, kind, body) if len(body) > BIG_BODY else parse_request(kind, body)
        )
        retry_key = request.headers.get("x-idempotency-key") if parsed.seq is None else None
        request_id = service.training.submit(caller, parsed, retry_key=retry_key)
    except HttpFailure as failure:
        if failure.status < 429:
            await _refuse(service, caller, kind, body)
        raise
    except InvalidBodyError as error:
        _use_number(service, caller, error.mistakes.sender)
        raise
    except (TurnwiseError, ValidationError):
        await _refuse(service, caller, kind, body)
        raise
    return promised(request_id, model_id=parsed.model_id)


async def _refuse(service: Service, caller: Caller, kind: str, body: bytes) -> None:
    _use_number(service, caller, await asyncio.to_thread(sender_of, kind, body))


def _use_number(service: Service, caller: Caller, sender: tuple[str, int] | None) -> None:
    """A request that is refused uses up its number; the next one would wait for it otherwise."""
    if sender is not None:
        model_id, seq = sender
        service.training.refuse(caller, model_id, seq)


@router.post("/create_model")
async def create_model(service: ServiceDep, caller: CallerDep, body: schemas.CreateModelBody) -> JSONResponse:
    request_id, model_id = service.training.create(caller, body)
    return promised(request_id, model_id=model_id)


@router.post("/get_info")
async def get_info(
    service: ServiceDep, caller: CallerDep, body: schemas.ModelBody, request: Request
) -> dict[str, object]:
    run = service.store.run(body.model_id, caller.owner)
    if run is None:
        raise not_found("model")
    served = service.models.find(run.base_model)
    return {
        "type": "get_info",
        "model_id": run.model_id,
        "model_data": {
            "arch": served.loaded.worker.engine.arch,
            "model_name": run.base_model,
            "tokenizer_id": served.tokenizer_name(is_local=is_local(request)),
        },
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "model_name": run.base_model,
        "optimizer_config": {"type": "adamw"},
    }


@router.post(
    "/forward_backward", openapi_extra=documented(schemas.ForwardBackwardBody, protobuf="ForwardBackwardRequest")
)
async def forward_backward(service: ServiceDep, caller: CallerDep, request: Request) -> JSONResponse:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (wire.PROTOBUF, wire.JSON):
        raise HttpFailure(415, f"content-type {content_type[:50]!r}; expected {wire.PROTOBUF} or {wire.JSON}")
    is_proto = content_type == wire.PROTOBUF
    return await submit(service, caller, request, "forward_backward.proto" if is_proto else "forward_backward.json")


# One function per endpoint, because FastAPI reads signatures and the OpenAPI document lists them by name.
@router.post("/forward", openapi_extra=documented(schemas.ForwardBody))
async def forward(service: ServiceDep, caller: CallerDep, request: Request) -> JSONResponse:
    return await submit(service, caller, request, "forward.json")


@router.post("/optim_step", openapi_extra=documented(schemas.OptimStepBody))
async def optim_step(service: ServiceDep, caller: CallerDep, request: Request) -> JSONResponse:
    return await submit(service, caller, request, "optim_step")


@router.post("/save_weights", openapi_extra=documented(schemas.SaveWeightsBody))
async def save_weights(service: ServiceDep, caller: CallerDep, request: Request) -> JSONResponse:
    return await submit(service, caller, request, "save_weights")


@router.post("/save_weights_for_sampler", openapi_extra=documented(schemas.SaveWeightsBody))
async def save_weights_for_sampler(service: ServiceDep, caller: CallerDep, request: Request) -> JSONResponse:
    return await submit(service, caller, request, "save_weights_for_sampler")


@router.post("/save_weights_external", openapi_extra=documented(schemas.SaveWeightsBody))
async def save_weights_external(service: ServiceDep, caller: CallerDep, request: Request) -> JSONResponse:
    return await submit(service, caller, request, "save_weights_external")


@router.post("/load_weights", openapi_extra=documented(schemas.LoadWeightsBody))
async def load_weights(service: ServiceDep, caller: CallerDep, request: Request) -> JSONResponse:
    body = await read_body(request, service.config.max_body_bytes)
    asked = schemas.LoadWeightsBody.model_validate_json(body)
    if asked.model_id is not None:
        return await submit(service, caller, request, "load_weights")
    if asked.session_id is None or asked.model_seq_id is None:
        raise HttpFailure(400, "send model_id and seq_id, or session_id and model_seq_id to create the model too")
    row = service.checkpoints.find(asked.path, caller.owner)
    lora = schemas.LoraBody(
        rank=row.lora.rank,
        train_unembed=row.lora.train_unembed,
        train_mlp=row.lora.train_mlp,
        train_attn=row.lora.train_attn,
    )
    create = schemas.CreateModelBody(
        session_id=asked.session_id,
        model_seq_id=asked.model_seq_id,
        base_model=row.base_model,
        user_metadata={**_kind_of(row), **(asked.user_metadata or {})},
        lora_config=lora,
        optimizer_config=asked.optimizer_config,
    )
    _, model_id = service.training.create(caller, create)
    load = asked.model_copy(update={"model_id": model_id})
    parsed = TrainingRequest(
        kind="load_weights", model_id=model_id, seq=None, body=load.model_dump_json().encode(), parsed=load
    )
    return promised(service.training.submit(caller, parsed, retry_key=f"load:{model_id}"), model_id=model_id)


def _kind_of(row: OwnedCheckpointRow) -> dict[str, str]:
    """The metadata of a model that is made from a critic's checkpoint: it is a critic too."""
    return {KIND_KEY: row.user_metadata[KIND_KEY]} if KIND_KEY in row.user_metadata else {}


@router.post("/create_custom_loss")
async def create_custom_loss(_: CallerDep) -> JSONResponse:
    raise HttpFailure(400, wire.REFUSED_LOSSES["custom"])


@router.post("/weights_info")
async def weights_info(service: ServiceDep, caller: CallerDep, body: schemas.WeightsInfoBody) -> dict[str, object]:
    row = service.checkpoints.find(body.tinker_path, caller.owner)
    return {
        "base_model": row.base_model,
        "is_lora": True,
        "lora_rank": row.lora.rank,
        "train_unembed": row.lora.train_unembed,
        "train_mlp": row.lora.train_mlp,
        "train_attn": row.lora.train_attn,
        "optimizer_config": {"type": "adamw"},
    }


@router.post("/unload_model")
async def unload_model(service: ServiceDep, caller: CallerDep, body: schemas.ModelBody) -> JSONResponse:
    """Park the adapter at once; it is loaded when it is used again."""
    model = service.training.get(body.model_id, caller.owner)
    if model.lane.is_idle and model.adapter.is_resident:
        service.training.snapshot(model, park=True)
    promise = service.promises.create(caller.owner, "UnloadModel", 0)
    done = JsonReply({"type": "unload_model", "model_id": body.model_id, "time": time.time()})
    service.promises.settle(promise, done)
    return promised(promise.request_id, model_id=body.model_id)
