"""What the server says of itself: models, health, version, metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

import quantkit

from .context import Context


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class HealthReport(TypedDict):
    status: Literal["ok", "draining", "degraded", "stuck", "dead"]
    reason: str | None


class Version(TypedDict):
    version: str
    model: str
    max_model_len: int
    kv_format_id: str
    memory: dict[str, int]
    config: dict[str, Any]


def model(context: Context, name: str) -> Model:
    """
    Raises:
        ApiError: 404.
    """
    context.check_model(name)
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "quantkit",
        "root": context.service.facts.name,
        "parent": None,
        "max_model_len": context.max_tokens,
    }


def models(context: Context) -> Models:
    return {"object": "list", "data": [model(context, name) for name in context.names]}


def health(context: Context) -> JSONResponse:
    """503 for whatever a load balancer should act on, draining included."""
    found = context.service.health()
    report: HealthReport = {"status": "ok", "reason": found.reason}
    if not found.is_alive:
        report["status"] = "dead"
    elif found.is_stuck:
        report["status"] = "stuck"
    elif found.is_degraded:
        report["status"] = "degraded"
    elif not context.gate.is_open:
        report = {"status": "draining", "reason": "the server is shutting down"}
    return JSONResponse(report, 200 if report["status"] == "ok" else 503)


def version(context: Context) -> Version:
    facts = context.service.facts
    return {
        "version": quantkit.__version__,
        "model": facts.name,
        "max_model_len": context.max_tokens,
        "kv_format_id": facts.kv_format_id,
        "memory": dict(facts.memory),
        "config": asdict(context.service.config),
    }


def metrics(context: Context, accept: str) -> Response:
    text, kind = context.meter.exposition(accept)
    return Response(text, headers={"Content-Type": kind})
