"""Lists training runs, checkpoints and sessions, and changes checkpoints from outside a session."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse

from turnwise.service.failures import not_found
from turnwise.service.routes.common import PREFIX, CallerDep, ServiceDep
from turnwise.service.service import Service
from turnwise.service.store.session_search import search
from turnwise.service.store.store import OwnedCheckpointRow, RunRow, iso
from turnwise.service.training.checkpoints import TYPE_OF, exported_files, stream_tar
from turnwise.service.wire import schemas

router = APIRouter(prefix=PREFIX, tags=["rest"])

Limit = Annotated[int, Query(ge=0, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**53)]
Kind = Literal["weights", "sampler_weights", "external_weights"]
Name = Annotated[str, Path(max_length=200)]
CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


def checkpoint_json(row: OwnedCheckpointRow) -> dict[str, object]:
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": TYPE_OF[row.kind],
        "time": iso(row.created_at),
        "tinker_path": row.path,
        "size_bytes": row.size_bytes,
        "public": row.is_public,
        "user_metadata": dict(row.user_metadata) or None,
        "expires_at": None if row.expires_at is None else iso(row.expires_at),
    }


def run_json(service: Service, run: RunRow, owner_name: str) -> dict[str, object]:
    rows = service.store.checkpoints_of_run(run.model_id, run.owner)
    newest = {kind: next((row for row in rows if row.kind == kind), None) for kind in ("weights", "sampler_weights")}
    training, sampler = newest["weights"], newest["sampler_weights"]
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": owner_name,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.lora.rank,
        "last_request_time": iso(run.last_request_at),
        "last_checkpoint": None if training is None else checkpoint_json(training),
        "last_sampler_checkpoint": None if sampler is None else checkpoint_json(sampler),
        "user_metadata": dict(run.user_metadata) or None,
    }


def _visible(rows: list[OwnedCheckpointRow], request: Request) -> list[OwnedCheckpointRow]:
    """Rows that have not expired; SDKs before 0.36 cannot read external ones."""
    is_old = "Tinker/Python 0.2" in request.headers.get("user-agent", "")
    now = time.time()
    return [
        row
        for row in rows
        if (row.expires_at is None or row.expires_at > now) and not (is_old and row.kind == "external_weights")
    ]


@router.get("/training_runs")
async def list_training_runs(
    service: ServiceDep, caller: CallerDep, limit: Limit = 20, offset: Offset = 0
) -> dict[str, object]:
    runs = [run_json(service, run, caller.name) for run in service.store.runs(caller.owner, limit, offset)]
    total = service.store.count_runs(caller.owner)
    return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": total}}


@router.get("/training_runs/{run_id}")
async def get_training_run(service: ServiceDep, caller: CallerDep, run_id: str) -> dict[str, object]:
    run = service.store.run(run_id, caller.owner)
    if run is None:
        raise not_found("training run")
    return run_json(service, run, caller.name)


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(service: ServiceDep, caller: CallerDep, run_id: str, request: Request) -> dict[str, object]:
    rows = service.store.checkpoints_of_run(run_id, caller.owner)
    if not rows and service.store.run(run_id, caller.owner) is None:
        raise not_found("training run")
    return {"checkpoints": [checkpoint_json(row) for row in _visible(rows, request)]}


@router.get("/checkpoints")
async def list_user_checkpoints(
    service: ServiceDep, caller: CallerDep, request: Request, limit: Limit = 100, offset: Offset = 0
) -> dict[str, object]:
    rows = service.store.checkpoints_of_owner(caller.owner, limit, offset)
    total, _ = service.store.checkpoint_totals(caller.owner)
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return {"checkpoints": [checkpoint_json(row) for row in _visible(rows, request)], "cursor": cursor}


@router.delete(CHECKPOINT)
async def delete_checkpoint(
    service: ServiceDep, caller: CallerDep, run_id: str, kind: Kind, name: Name
) -> JSONResponse:
    service.checkpoints.delete(service.checkpoints.get(run_id, kind, name, caller.owner))
    return JSONResponse({"status": "ok"})


# FastAPI reads a route's parameters from its signature, so the routes of one checkpoint repeat theirs.
@router.post(CHECKPOINT + "/publish")
async def publish_checkpoint(
    service: ServiceDep, caller: CallerDep, run_id: str, kind: Kind, name: Name
) -> JSONResponse:
    row = service.checkpoints.get(run_id, kind, name, caller.owner)
    service.store.put(replace(row, is_public=True))
    return JSONResponse({"status": "ok"})


@router.delete(CHECKPOINT + "/publish")
async def unpublish_checkpoint(
    service: ServiceDep, caller: CallerDep, run_id: str, kind: Kind, name: Name
) -> JSONResponse:
    row = service.checkpoints.get(run_id, kind, name, caller.owner)
    service.store.put(replace(row, is_public=False))
    return JSONResponse({"status": "ok"})


@router.put(CHECKPOINT + "/ttl")
async def set_checkpoint_ttl(
    service: ServiceDep, caller: CallerDep, run_id: str, kind: Kind, name: Name, body: schemas.TtlBody
) -> JSONResponse:
    row = service.checkpoints.get(run_id, kind, name, caller.owner)
    expires_at = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
    service.store.put(replace(row, expires_at=expires_at))
    return JSONResponse({"status": "ok"})


@router.get(CHECKPOINT + "/archive")
async def checkpoint_archive(
    service: ServiceDep, caller: CallerDep, run_id: str, kind: Kind, name: Name, request: Request
) -> Response:
    """Redirect to a signed link, which needs no key. The SDKs expect this."""
    row = service.checkpoints.get(run_id, kind, name, caller.owner, may_be_public=True)
    token, expires = service.access.make_link({"path": row.path, "file": "archive.tar"})
    url = f"{_base_url(request)}{PREFIX}/downloads/{token}/archive.tar"
    expiry = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    return Response(status_code=302, headers={"location": url, "expires": expiry})


@router.get(CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(
    service: ServiceDep, caller: CallerDep, run_id: str, kind: Kind, name: Name, request: Request
) -> dict[str, object]:
    row = service.checkpoints.get(run_id, kind, name, caller.owner, may_be_public=True)
    urls: dict[str, str] = {}
    expires = 0.0
    for path in exported_files(service.checkpoints.directory(row)):
        token, expires = service.access.make_link({"path": row.path, "file": path.name})
        urls[path.name] = f"{_base_url(request)}{PREFIX}/downloads/{token}/{path.name}"
    return {"urls": urls, "expires": iso(expires)}


@router.get("/downloads/{token}/{file_name}")
async def download(service: ServiceDep, token: str, file_name: str) -> Response:
    """Send one file, or the whole checkpoint as a tar, to anyone with a signed link."""
    what = service.access.read_link(token)
    row = service.checkpoints.by_link(what["path"])
    directory = service.checkpoints.directory(row)
    if what["file"] == "archive.tar" and file_name == "archive.tar":
        return StreamingResponse(stream_tar(directory), media_type="application/x-tar")
    names = {path.name: path for path in exported_files(directory)}
    if file_name != what["file"] or file_name not in names:
        raise not_found("download")
    return FileResponse(names[file_name])


def _base_url(request: Request) -> str:
    return str(request.base_url).rstrip("/")


@router.post("/copy_weights")
async def copy_weights(service: ServiceDep, caller: CallerDep, body: schemas.CopyWeightsBody) -> dict[str, str]:
    """Copy a checkpoint of the caller, or a published one. The copy belongs to the caller."""
    source = service.checkpoints.find(body.source_path, caller.owner)
    now = time.time()
    target = replace(
        source,
        model_id=f"{uuid.uuid4()}:copy:0",
        owner=caller.owner,
        request_id="",
        created_at=now,
        expires_at=None if body.ttl_seconds is None else now + body.ttl_seconds,
        is_public=False,
    )
    written = await service.copy_checkpoint(source, target)
    return {"tinker_path": written.path}


@router.get("/sessions")
async def list_sessions(
    service: ServiceDep, caller: CallerDep, limit: Limit = 20, offset: Offset = 0
) -> dict[str, object]:
    return {"sessions": [row.session_id for row in service.store.sessions(caller.owner, limit, offset)]}


@router.post("/sessions/search")
async def search_sessions(service: ServiceDep, caller: CallerDep, body: schemas.SearchBody) -> dict[str, object]:
    found, cursor = search(service.store, caller, body)
    return {"sessions": found, "next_cursor": cursor}


@router.get("/sessions/{session_id}")
async def get_session(service: ServiceDep, caller: CallerDep, session_id: str) -> dict[str, object]:
    row = service.session(session_id, caller)
    return {
        "training_run_ids": [run.model_id for run in service.store.runs_of_session(session_id)],
        "sampler_ids": [sampler.sampler_id for sampler in service.store.samplers_of_session(session_id)],
        "user_metadata": dict(row.user_metadata) or None,
        "display_name": row.display_name,
    }


@router.put("/sessions/{session_id}/project")
async def assign_session_project(
    service: ServiceDep, caller: CallerDep, session_id: str, body: schemas.ProjectBody
) -> JSONResponse:
    row = service.session(session_id, caller)
    row.project_id = body.project_id
    service.store.put(row)
    return JSONResponse({"status": "ok"})


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(service: ServiceDep, caller: CallerDep, session_id: str) -> dict[str, object]:
    service.session(session_id, caller)
    return {"status": "failed", "error": "this service keeps no traces of sessions"}


@router.get("/audit")
async def audit(_: CallerDep) -> dict[str, object]:
    return {"entries": []}


@router.get("/billing/usage/events")
async def billing_events(_: CallerDep) -> dict[str, object]:
    return {"data": [], "sessions": {}}


@router.get("/billing/usage/checkpoints/current")
async def billing_checkpoints(service: ServiceDep, caller: CallerDep) -> dict[str, object]:
    count, size = service.store.checkpoint_totals(caller.owner)
    return {"data": [{"checkpoint_count": count, "size_bytes": size, "size_gigabytes": size / 1e9}]}
