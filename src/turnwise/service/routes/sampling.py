"""Sampling sessions and requests, and the futures of every kind of request."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from turnwise.service.futures import Promise
from turnwise.service.routes.common import (
    PREFIX,
    CallerDep,
    ServiceDep,
    documented,
    get_caller,
    get_service,
    is_local,
    promised,
)
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire

router = APIRouter(prefix=PREFIX, tags=["sampling"])


# Routes are tried in the order they are written: the two that every sample uses come first. Both read their bodies
# themselves, which takes half the time that the framework's reading takes.


@router.post("/asample", openapi_extra=documented(schemas.SampleBody))
async def asample(request: Request) -> JSONResponse:
    service, caller = await get_service(request), await get_caller(request)
    content = await request.body()
    await service.screen.check(schemas.SampleBody, content)
    body = schemas.SampleBody.model_validate_json(content)
    request_id, sequence_ids = service.sampling.submit(caller, body, len(content))
    return promised(request_id, sample_sequence_ids=sequence_ids)


@router.post("/retrieve_future", openapi_extra=documented(schemas.RetrieveFutureBody))
async def retrieve_future(request: Request) -> Response:
    """Wait for a result. If there is none in time, answer 408 and say why it takes long."""
    service, caller = await get_service(request), await get_caller(request)
    body = schemas.RetrieveFutureBody.model_validate_json(await request.body())
    promise = service.promises.get(body.request_id, caller.owner)
    if not await service.promises.wait(promise, service.config.hold_s):
        return _try_again(promise)
    promise.was_read = True
    outcome = promise.outcome
    assert outcome is not None
    proto = outcome.to_proto() if wire.PROTOBUF in request.headers.get("accept", "") else None
    return JSONResponse(outcome.to_json()) if proto is None else Response(proto, media_type=wire.PROTOBUF)


def _try_again(promise: Promise) -> JSONResponse:
    state, reason = promise.why_waiting()
    body: dict[str, Any] = {"type": "try_again", "request_id": promise.request_id, "queue_state": state}
    if reason is not None:
        body["queue_state_reason"] = reason
    return JSONResponse(body, status_code=408)


@router.post("/create_sampling_session")
async def create_sampling_session(
    service: ServiceDep, caller: CallerDep, body: schemas.CreateSamplingSessionBody
) -> dict[str, object]:
    return {"type": "create_sampling_session", "sampling_session_id": service.sampling.create(caller, body)}


@router.post("/join_sampling_session")
async def join_sampling_session(
    service: ServiceDep, caller: CallerDep, body: schemas.SamplingSessionBody
) -> dict[str, object]:
    counter = service.sampling.join(body.sampling_session_id, caller.owner)
    return {"type": "join_sampling_session", "client_counter": counter}


@router.get("/samplers/{sampler_id}")
async def get_sampler(service: ServiceDep, caller: CallerDep, sampler_id: str, request: Request) -> dict[str, object]:
    sampler = service.sampling.get(sampler_id, caller.owner)
    base_model = sampler.row.base_model
    if "/" not in base_model:  # a name that only this service knows, and SDKs load the tokenizer by it
        base_model = sampler.served.tokenizer_name(is_local=is_local(request))
    return {"sampler_id": sampler_id, "base_model": base_model, "model_path": sampler.row.model_path}


@router.post("/retrieve_futures")
async def retrieve_futures(
    service: ServiceDep, caller: CallerDep, body: schemas.RetrieveFuturesBody
) -> dict[str, object]:
    """Return what finished in one sampling session since the cursor; the call waits while there is nothing new."""
    sampler = service.sampling.get(body.target.sampling_session_id, caller.owner)
    cursor = body.prev_cursor or 0
    deadline_s = min(service.config.hold_s, body.timeout or service.config.hold_s)
    until = asyncio.get_running_loop().time() + deadline_s
    while True:
        news = sampler.news
        found = [
            (number, request_id, is_good)
            for number, clone, request_id, is_good in sampler.completions
            if number > cursor and clone == body.target.cloned_sampler_id
        ]
        left_s = until - asyncio.get_running_loop().time()
        if found or left_s <= 0 or service.promises.is_closing:
            break
        try:
            async with asyncio.timeout(min(left_s, 1.0)):
                await news.wait()
        except TimeoutError:
            continue
    completions = [
        {"state": "finished" if is_good else "failed", "request_id": request_id} for _, request_id, is_good in found
    ]
    return {"completions": completions, "cursor": max((number for number, _, _ in found), default=cursor)}


@router.post("/cancel_future")
async def cancel_future(service: ServiceDep, caller: CallerDep, body: schemas.RequestBody) -> dict[str, str]:
    promise = service.promises.get(body.request_id, caller.owner)
    if promise.on_cancel is not None and not promise.is_done:
        promise.on_cancel()
    return {"status": "ok"}
