"""What a client calls when it starts and later: configuration, tokens, sessions, heartbeats, telemetry, health."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from turnwise.service.failures import HttpFailure
from turnwise.service.routes.common import PREFIX, CallerDep, ServiceDep
from turnwise.service.wire import schemas

router = APIRouter(prefix=PREFIX, tags=["sessions"])

CLIENT_CONFIG = {
    # The JWT exchange is on, because the SDK accepts keys that start with `sk-` only with it.
    "pjwt_auth_enabled": True,
    # SDK 0.22 asks for archives with its own transport, which wrongly follows redirects.
    "use_pyqwest_transport": False,
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@router.post("/client/config")
async def client_config(_: CallerDep, body: schemas.ClientConfigBody) -> dict[str, object]:  # noqa: ARG001
    return dict(CLIENT_CONFIG)


@router.post("/client/dynamic_config")
async def client_dynamic_config(_: CallerDep, body: schemas.ClientConfigBody) -> dict[str, object]:  # noqa: ARG001
    return dict(DYNAMIC_CONFIG)


@router.post("/auth/token")
async def auth_token(service: ServiceDep, caller: CallerDep) -> dict[str, str]:
    return {"jwt": service.access.make_token(caller)}


@router.get("/auth/apikey/me")
async def auth_me(caller: CallerDep) -> dict[str, object]:
    details = {"org_details": {"name": "turnwise"}, "user_details": {"email": f"{caller.owner}@localhost"}}
    key_id = int(caller.owner) if caller.owner.isdigit() else 0
    return {"key_id": key_id, "name": caller.name, "note": "", "details": details}


@router.post("/create_session")
async def create_session(service: ServiceDep, caller: CallerDep, body: schemas.CreateSessionBody) -> dict[str, object]:
    return {"type": "create_session", "session_id": service.create_session(caller, body).session_id}


@router.post("/session_heartbeat")
async def session_heartbeat(service: ServiceDep, caller: CallerDep, body: schemas.SessionBody) -> dict[str, object]:
    service.heartbeat(body.session_id, caller)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(
    service: ServiceDep, caller: CallerDep, session_id: str, body: schemas.FinishBody
) -> dict[str, str]:
    row = service.session(session_id, caller)
    row.finished = json.dumps({"reason": {"type": (body.reason or {}).get("type")}, "detail": body.detail})
    service.store.put(row)
    return {"status": "ok"}


@router.post("/telemetry")
async def telemetry(_: CallerDep, request: Request) -> dict[str, str]:
    """Accept the events and drop them: they hold tracebacks and sometimes API keys."""
    await request.body()
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(service: ServiceDep, _: CallerDep) -> dict[str, object]:
    models = [
        {
            "model_name": model.name,
            "max_context_length": model.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        for model in service.models
    ]
    return {"supported_models": models}


@router.get("/healthz")
async def healthz(service: ServiceDep) -> JSONResponse:
    if any(model.loaded.worker.is_stopped for model in service.models):
        raise HttpFailure(503, "an engine has stopped; restart the server")
    return JSONResponse({"status": "ok"})
