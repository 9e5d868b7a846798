"""`/metrics` for Prometheus, and `/healthz` for health checks.

Every accepted request passes `Promises.settle`, so tokens, steps and failures are counted there, whichever endpoint
they came by. Gauges are read when somebody asks. `/metrics` needs a key where keys exist; `/healthz` never does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise import __version__
from turnwise.service.futures import Promise
from turnwise.service.openai.errors import KeyHolder
from turnwise.service.service import Service

router = APIRouter(tags=["health"])

SECONDS = (0.01, 0.05, 0.2, 1, 5, 20, 60, 300)


class Metrics:
    """The counters of one application."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._watched: Service | None = None
        self.registry = CollectorRegistry()
        names: dict[str, Any] = {"registry": self.registry}
        self.calls = Counter("turnwise_http_requests", "HTTP calls, by route and status", ["route", "status"], **names)
        self.seconds = Histogram(
            "turnwise_http_seconds", "From a call to the end of its answer", ["route"], buckets=SECONDS, **names
        )
        self.requests = Counter("turnwise_requests", "Accepted requests that ended", ["kind", "outcome"], **names)
        self.sampled = Counter("turnwise_sampled_tokens", "Tokens drawn", **names)
        self.trained = Counter("turnwise_trained_tokens", "Targets that a loss was computed on", **names)
        self.steps = Counter("turnwise_optimizer_steps", "Optimizer steps, over all training clients", **names)
        self.registry.register(self)

    def watch(self, service: Service) -> None:
        """Count the requests that this service settles."""
        if self._watched is not service:
            self._watched = service
            service.promises.on_settled = self._settled

    def _settled(self, promise: Promise) -> None:
        outcome = promise.outcome
        assert outcome is not None, "it was settled"
        failure = outcome.failure
        self.requests.labels(promise.kind, "done" if failure is None else f"failed_{failure.category}").inc()
        self.sampled.inc(outcome.num_sampled_tokens)
        self.trained.inc(outcome.num_trained_tokens)
        if promise.kind == "optim_step" and failure is None:
            self.steps.inc()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Prometheus asks for these while it reads the registry."""
        service = self._watched
        if service is None:
            return
        yield GaugeMetricFamily("turnwise_requests_waiting", "Not finished yet", value=service.promises.num_waiting)
        running = GaugeMetricFamily("turnwise_samples_running", "Sequences being drawn", labels=["model"])
        blocks = GaugeMetricFamily("turnwise_kv_blocks", "Blocks of the KV cache", labels=["model"])
        alive = GaugeMetricFamily("turnwise_engine_up", "1 while the engine runs", labels=["model"])
        for model in service.models:
            engine = model.loaded.worker.engine
            running.add_metric([model.name], service.sampling.num_running(model.name))
            blocks.add_metric([model.name], engine.sampler.pool.num_blocks)
            alive.add_metric([model.name], 0.0 if model.loaded.worker.is_stopped else 1.0)
        yield from (running, blocks, alive)


class CountCalls:
    """Counts HTTP calls by route; all paths without a route count together."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = getattr(scope["app"].state, "service", None)
        if service is not None:
            self._metrics.watch(service)
        status, started_s = 500, time.perf_counter()

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.calls.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - started_s)


def add_metrics(app: FastAPI) -> None:
    """Count this application's calls, and add the endpoints that show the counts."""
    app.state.metrics = Metrics(app)
    app.add_middleware(CountCalls, metrics=app.state.metrics)
    app.include_router(router)


@router.get("/metrics", response_model=None)
async def metrics(_: KeyHolder, request: Request) -> Response:
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/healthz", response_model=None)
async def healthz(request: Request) -> JSONResponse:
    """Whether every engine runs; also tells clients what this server is."""
    service: Service = request.app.state.service
    is_up = not any(model.loaded.worker.is_stopped for model in service.models)
    body = {"status": "ok" if is_up else "an engine has stopped", "service": "turnwise", "version": __version__}
    return JSONResponse(body, 200 if is_up else 503)
