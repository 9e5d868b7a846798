"""The OpenAI-compatible routes, and captures of what goes through them."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import JSONResponse

from turnwise.envs.chat_api.bodies import ChatBody
from turnwise.service.failures import HttpFailure
from turnwise.service.openai.capture import Capture
from turnwise.service.openai.chat import answer_chat
from turnwise.service.openai.completions import answer_completion
from turnwise.service.openai.errors import AsciiJson, KeyHolder, OpenAIRoute
from turnwise.service.openai.gateway import Gateway, GatewayDep
from turnwise.service.openai.schemas import CaptureBody, CompletionBody, RewardBody
from turnwise.trajectory import trajectory_to_json

router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute, default_response_class=AsciiJson)

MAX_LISTED = 1000

CaptureId = Annotated[str, Path(max_length=100, pattern=r"^[A-Za-z0-9-]+$")]


@router.post("/chat/completions", response_model=None)
async def chat_completions(gateway: GatewayDep, caller: KeyHolder, request: Request, body: ChatBody) -> Response:
    return await answer_chat(gateway, caller, request, body)


@router.post("/completions", response_model=None)
async def completions(gateway: GatewayDep, caller: KeyHolder, request: Request, body: CompletionBody) -> Response:
    return await answer_completion(gateway, caller, request, body)


@router.get("/models")
async def list_models(gateway: GatewayDep, caller: KeyHolder) -> dict[str, Any]:
    """Base models, policies by name, and the caller's own checkpoints, newest first."""
    service = gateway.service
    now = time.time()
    saved = [
        _model_json(row.path, int(row.created_at))
        for row in service.store.checkpoints_of_owner(caller.owner, MAX_LISTED, 0)
        if row.kind == "sampler_weights" and (row.expires_at is None or row.expires_at > now)
    ]
    names = [*(model.name for model in service.models), *service.models.policies]
    return {"object": "list", "data": [*(_model_json(name, 0) for name in names), *saved]}


@router.get("/models/{model:path}")
async def get_model(gateway: GatewayDep, caller: KeyHolder, model: str) -> dict[str, Any]:
    # Proxies and clients may turn two slashes in a URL into one, so both forms are accepted.
    name = model if "://" in model else model.replace(":/", "://", 1)
    await gateway.find(name, caller)
    return _model_json(name, 0)


def _model_json(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "turnwise"}


@router.post("/captures")
async def create_capture(gateway: GatewayDep, caller: KeyHolder, request: Request, body: CaptureBody) -> dict[str, Any]:
    """Start a trajectory. Give the answer's `base_url` to the agent's OpenAI client."""
    if body.model is not None:
        await gateway.find(body.model, caller)
    capture = gateway.captures.create(caller.owner, body)
    return _capture_json(capture, request, with_trajectory=False)


@router.get("/captures")
async def list_captures(gateway: GatewayDep, caller: KeyHolder, request: Request) -> dict[str, Any]:
    found = [_capture_json(one, request, with_trajectory=False) for one in gateway.captures.of(caller.owner)]
    return {"object": "list", "data": found}


@router.get("/captures/{capture_id}")
async def get_capture(
    gateway: GatewayDep, caller: KeyHolder, request: Request, capture_id: CaptureId
) -> dict[str, Any]:
    """The capture with its trajectory; null before the first turn."""
    return _capture_json(gateway.captures.get(capture_id, caller.owner), request, with_trajectory=True)


@router.post("/captures/{capture_id}/reward")
async def reward_capture(
    gateway: GatewayDep,
    caller: KeyHolder,
    request: Request,
    capture_id: CaptureId,
    body: RewardBody,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> dict[str, Any]:
    """Add a reward to a turn, or say whether the whole attempt was a success; once for each `Idempotency-Key`."""
    if body.reward is None and body.is_success is None:
        raise HttpFailure(400, "send reward (a number) or is_success, or both")
    capture = gateway.captures.get(capture_id, caller.owner)
    capture.reward(body, idempotency_key)
    return _capture_json(capture, request, with_trajectory=False)


@router.delete("/captures/{capture_id}")
async def delete_capture(gateway: GatewayDep, caller: KeyHolder, capture_id: CaptureId) -> JSONResponse:
    gateway.captures.delete(capture_id, caller.owner)
    return JSONResponse({"id": capture_id, "deleted": True})


@router.post("/capture/{capture_id}/chat/completions", response_model=None)
async def captured_chat_completions(
    gateway: GatewayDep, caller: KeyHolder, request: Request, capture_id: CaptureId, body: ChatBody
) -> Response:
    """Like `/v1/chat/completions`, and record the call."""
    capture = _used(gateway, capture_id, caller.owner)
    return await answer_chat(gateway, caller, request, body, capture)


@router.get("/capture/{capture_id}/models")
async def captured_models(gateway: GatewayDep, caller: KeyHolder, capture_id: CaptureId) -> dict[str, Any]:
    _used(gateway, capture_id, caller.owner)
    return await list_models(gateway, caller)


def _used(gateway: Gateway, capture_id: str, owner: str) -> Capture:
    capture = gateway.captures.get(capture_id, owner)
    capture.used_s = time.time()
    return capture


def _capture_json(capture: Capture, request: Request, *, with_trajectory: bool) -> dict[str, Any]:
    base = str(request.base_url).rstrip("/")
    found: dict[str, Any] = {
        "id": capture.id,
        "object": "capture",
        "base_url": f"{base}/v1/capture/{capture.id}",
        "num_turns": len(capture.turns),
        **capture.settings.model_dump(),
    }
    if with_trajectory:
        trajectory = capture.to_trajectory()
        found["trajectory"] = None if trajectory is None else trajectory_to_json(trajectory)
    return found
