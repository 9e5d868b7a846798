"""Search in the caller's own sessions, newest first, page by page."""

from __future__ import annotations

import json
import math
import time

from turnwise.service.access import Caller
from turnwise.service.store.store import SessionRow, Store, iso
from turnwise.service.wire import schemas

ACTIVE_S = 120.0
"""A session that sent no heartbeat for this long counts as not running."""
PAGE = 200
MAX_LOOKED_AT = 20_000


def search(store: Store, caller: Caller, body: schemas.SearchBody) -> tuple[list[dict[str, object]], object]:
    """One page, and where the next one starts."""
    created_at, session_id = math.inf, ""
    if body.cursor is not None:
        created_at, session_id = body.cursor.last_created_at.timestamp(), body.cursor.last_session_id
    found: list[SessionRow] = []
    for _ in range(MAX_LOOKED_AT // PAGE):
        rows = store.sessions_before(caller.owner, created_at, session_id, PAGE)
        found += [row for row in rows if _matches(row, body)]
        if len(found) > body.limit or len(rows) < PAGE:
            break
        created_at, session_id = rows[-1].created_at, rows[-1].session_id
    page = found[: body.limit]
    cursor = None
    if len(found) > body.limit:
        cursor = {"last_created_at": iso(page[-1].created_at), "last_session_id": page[-1].session_id}
    return [_summary(store, caller, row) for row in page], cursor


def _matches(row: SessionRow, body: schemas.SearchBody) -> bool:
    if body.session_id is not None or body.display_name is not None:
        words = (body.display_name or "").lower().split()
        name = (row.display_name or "").lower()
        is_named = bool(words) and all(word in name for word in words)
        if not (is_named or row.session_id == body.session_id):
            return False
    if body.project_ids is not None and row.project_id not in body.project_ids:
        return False
    if any(row.user_metadata.get(key) != value for key, value in body.user_metadata.items()):
        return False
    return body.statuses is None or any(_has_status(row, asked) for asked in body.statuses)


def _has_status(row: SessionRow, asked: schemas.StatusBody) -> bool:
    status = _status(row)
    if status is None or status["type"] != asked.type:
        return False
    reason = status.get("reason")
    return asked.reasons is None or (isinstance(reason, dict) and reason.get("type") in asked.reasons)


def _status(row: SessionRow) -> dict[str, object] | None:
    if row.finished is not None:
        finished = json.loads(row.finished)
        reason = finished["reason"] if finished["reason"] in _REASONS else _REASONS[0]
        return {"type": "client_finished", "reason": reason, "detail": finished["detail"]}
    return {"type": "active"} if time.time() - row.last_seen_at < ACTIVE_S else None


_REASONS = [{"type": "success"}, {"type": "errored"}, {"type": "interrupted"}]


def _summary(store: Store, caller: Caller, row: SessionRow) -> dict[str, object]:
    count, size = store.session_totals(row.session_id)
    return {
        "session_id": row.session_id,
        "created_at": iso(row.created_at),
        "owner": caller.name,
        "project_id": row.project_id or "default",
        "status": _status(row),
        "checkpoints_count": count,
        "display_name": row.display_name,
        "user_metadata": dict(row.user_metadata) or None,
        "checkpoint_storage_bytes": size,
    }
