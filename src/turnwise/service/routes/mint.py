"""MinT's two extensions: reverse-KL training and interpolation of checkpoints."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from turnwise.service.routes.common import PREFIX, CallerDep, ServiceDep, documented, promised
from turnwise.service.routes.training import submit
from turnwise.service.wire import schemas

router = APIRouter(prefix=f"{PREFIX}/mint", tags=["mint"])


@router.post("/forward_backward_reverse_kl", openapi_extra=documented(schemas.ReverseKlBody))
async def forward_backward_reverse_kl(service: ServiceDep, caller: CallerDep, request: Request) -> JSONResponse:
    return await submit(service, caller, request, "reverse_kl")


@router.post("/checkpoints/interpolate")
async def interpolate(
    service: ServiceDep, caller: CallerDep, body: schemas.InterpolateBody, request: Request
) -> JSONResponse:
    retry_key = request.headers.get("x-idempotency-key")
    return promised(service.interpolation.submit(caller, body, retry_key=retry_key))
