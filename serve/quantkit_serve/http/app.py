"""The application: routes, and what stands before them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

import quantkit

from ..service import Service
from . import chat, completions, errors, live, status, tokens
from .body import BodyLimit, StrictRoute
from .context import Context
from .disconnect import ClientGone, while_connected
from .gate import GateKeeper
from .hosts import HostCheck
from .keys import KeyCheck
from .schemas.chat import ChatRequest
from .schemas.completions import CompletionRequest
from .schemas.tokens import DetokenizeRequest, TokenizeRequest
from .settings import HttpSettings
from .tokenizer import Tokenizer

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
GONE = 499  # nginx's number for a client that left; nobody reads it, logs do


def create_app(service: Service, tokenizer: Tokenizer, settings: HttpSettings) -> FastAPI:
    """The app; it starts the engine when it starts, and stops it when it stops.

    ``app.state.context`` is what its endpoints share; a server closes its gate to drain.
    """
    context = Context(service, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            context.gate.close()
            await context.stop()

    app = FastAPI(
        title="quantkit serve",
        version=quantkit.__version__,
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        responses=errors.DOCUMENTED,
    )
    app.state.context = context
    errors.install(app)
    app.include_router(_generation(context))
    app.include_router(_status(context))
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    # the last one added is the first one reached
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(GateKeeper, gate=context.gate)
    if settings.is_local and not settings.api_keys:
        app.add_middleware(HostCheck)
    if settings.api_keys:
        app.add_middleware(KeyCheck, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _generation(context: Context) -> APIRouter:
    router = APIRouter(route_class=StrictRoute)

    async def answered(request: Request, work: Any) -> Response:
        try:
            found: Response = await while_connected(request.receive, work)
        except ClientGone:
            return Response(status_code=GONE)
        return found

    @router.post("/v1/chat/completions", response_model=chat.ChatCompletion, responses=_EVENTS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answered(request, chat.answer(context, body))

    @router.post("/v1/completions", response_model=completions.Completion, responses=_EVENTS)
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        return await answered(request, completions.answer(context, body))

    @router.post("/tokenize", response_model=tokens.Tokens)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await answered(request, tokens.tokenize(context, body))

    @router.post("/detokenize", response_model=tokens.Text)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        return await answered(request, tokens.detokenize(context, body))

    return router


_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def _status(context: Context) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", response_model=status.Models)
    async def models() -> Response:
        return JSONResponse(status.models(context))

    @router.get("/v1/models/{name:path}", response_model=status.Model)
    async def model(name: str) -> Response:
        return JSONResponse(status.model(context, name))

    @router.get("/health", response_model=status.HealthReport, responses={503: {"model": status.HealthReport}})
    async def health() -> Response:
        return status.health(context)

    @router.get("/version", response_model=status.Version)
    async def version() -> Response:
        return JSONResponse(status.version(context))

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        return status.metrics(context, request.headers.get("accept", ""))

    @router.get("/live", response_model=live.Live)
    async def figures() -> Response:
        return JSONResponse(live.live(context))

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": POLICY})

    return router
