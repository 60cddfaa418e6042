"""The gateway as an ASGI application: routes, and every error in OpenAI's form.

One per worker process, on its event loop. What the endpoints do is in chat.py, completions.py and embeddings.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import slipstream
from slipstream.core.setting_values import shown
from slipstream.core.settings import BY_NAME
from slipstream.server.chat import chat
from slipstream.server.completions import complete
from slipstream.server.embeddings import cards, embed
from slipstream.server.errors import ApiError, error_body, model_not_found
from slipstream.server.gateway import Gateway
from slipstream.server.guard import Guard
from slipstream.server.ledger import Ledger, make_ledger
from slipstream.server.metrics import Metrics, make_file
from slipstream.server.options import GatewayOptions
from slipstream.server.sampling import PASSED_NAMES, naming_guides_as_asked
from slipstream.server.schemas import ChatRequest, CompletionRequest, EmbeddingRequest, ErrorBody

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
_SECURITY = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 421, 429, 500, 503, 504)
}
_STREAMED = {**_ERRORS, 200: {"content": {"application/json": {}, "text/event-stream": {}}}}
_TICK_S = 0.25
_UNREADABLE = "The request body cannot be read as JSON: it is not UTF-8, nested too deeply or has an endless number"
_CODES = {400: "invalid_value", 404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


@dataclass(frozen=True)
class Shared:
    """Files with shared counters that all workers map."""

    metrics: Path
    ledger: Path


@dataclass(frozen=True)
class Counts:
    """A worker's counters in the shared files."""

    metrics: Metrics
    ledger: Ledger


def make_shared(folder: Path, options: GatewayOptions) -> Shared:
    metrics = make_file(folder, options.workers, _names(options))
    return Shared(metrics, make_ledger(folder / "ledger", len(options.api_keys), options.workers))


def open_counts(options: GatewayOptions, shared: Shared | None) -> Counts:
    """shared: None for a process on its own."""
    metrics = Metrics(shared.metrics if shared else None, _names(options))
    return Counts(metrics, Ledger(len(options.api_keys), shared.ledger if shared else None))


def _names(options: GatewayOptions) -> list[str]:
    return [key.name for key in options.api_keys]


def create_app(options: GatewayOptions, counts: Counts) -> FastAPI:
    metrics = counts.metrics

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway = app.state.gateway = Gateway(options, metrics)
        ticker = asyncio.create_task(_tick(gateway))
        yield
        ticker.cancel()
        await gateway.link.close()

    app = FastAPI(
        title="Slipstream gateway",
        version=slipstream.__version__,
        description="OpenAI's API in front of Triton Inference Server.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    _add_generation(app)
    _add_models(app)
    _add_operations(app, options, metrics)
    if options.has_page:
        _add_page(app)
    _add_error_handlers(app)
    app.add_middleware(Guard, options=options, metrics=metrics, ledger=counts.ledger)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_generation(app: FastAPI) -> None:
    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        with naming_guides_as_asked(body):
            return await chat(request.app.state.gateway, body, request)

    @app.post("/v1/completions", responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        with naming_guides_as_asked(body):
            return await complete(request.app.state.gateway, body, request)

    @app.post("/v1/embeddings", responses=_ERRORS)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await embed(request.app.state.gateway, body, request)


def _add_models(app: FastAPI) -> None:
    @app.get("/v1/models", responses=_ERRORS)
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await _cards(request.app.state.gateway)})

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str, request: Request) -> Response:
        found = {card["id"]: card for card in await _cards(request.app.state.gateway)}
        if name not in found:
            raise model_not_found(name, list(found))
        return JSONResponse(found[name])


async def _cards(gateway: Gateway) -> list[dict[str, Any]]:
    """Generating models first, for clients that use the first model."""
    return [*(model.card() for model in await gateway.catalog.all()), *await cards(gateway)]


def _add_operations(app: FastAPI, options: GatewayOptions, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The gateway's process is alive."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses={503: {"model": ErrorBody}})
    async def ready(request: Request) -> Response:
        """Triton answers and at least one model is ready."""
        gateway = request.app.state.gateway
        if not await gateway.link.is_live():
            raise ApiError(503, f"Triton at {options.triton_url} does not answer", code="unavailable")
        names = [model.name for model in await gateway.catalog.all()]
        if not names:
            raise ApiError(503, "no model is ready", code="unavailable")
        return JSONResponse({"status": "ready", "models": names})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """The gateway's metrics, then Triton's if metrics_url is set."""
        text = metrics.render()
        if options.metrics_url:
            text += await asyncio.to_thread(_fetch, options.metrics_url)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.read().decode("utf-8", "replace")
    except OSError as error:
        return f"# Triton's metrics at {url} cannot be read: {error}\n"


def _add_page(app: FastAPI) -> None:
    for path, file in (("/", "index.html"), ("/chat.js", "chat.js"), ("/chat.css", "chat.css")):

        async def page(file: str = file) -> Response:
            return FileResponse(PAGE / file, headers=_SECURITY)

        app.add_api_route(path, page, include_in_schema=False)


async def _tick(gateway: Gateway) -> None:
    """Four times a second: collect the counts of streams and the lag of the event loop."""
    pace, metrics = gateway.pace, gateway.metrics
    while True:
        due = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        metrics.set("loop_lag_seconds", max(0.0, time.monotonic() - due))
        metrics.set("streams_in_flight", pace.num_streams)
        for name, value in (
            ("stream_events_total", pace.num_events),
            ("stream_tokens_total", pace.num_tokens),
            ("disconnects_total", pace.num_disconnects),
        ):
            metrics.add(name, value - pace.reported.get(name, 0))
            pace.reported[name] = value


# ---------------------------------------------------------------- errors


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return JSONResponse(error.body(), error.status_code, headers=error.headers)
        told = _UNREADABLE if error.status_code == 400 else str(error.detail)  # FastAPI's own 400 says no reason
        body = error_body(error.status_code, told, _CODES.get(error.status_code))
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        message, param = explain(error.errors())
        return JSONResponse(error_body(400, message, "invalid_value", param), 400)

    @app.exception_handler(UnicodeEncodeError)
    async def refuse_text(request: Request, error: UnicodeEncodeError) -> Response:
        return JSONResponse(error_body(400, "The request has text that is not valid Unicode (half a surrogate)"), 400)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, "The gateway failed; its log says why", "internal_error"), 500)


def _specificity(error: Any) -> tuple[bool, int]:
    """Sort key of errors: for a union, the error inside the matching type is more useful than "is not a string"."""
    return not error["type"].endswith("_type"), len(error["loc"])


def explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """The message and field of the first error, without pydantic's names of types and branches.

    For a setting, the engine's message precedes pydantic's.
    """
    first = max(errors, key=_specificity)
    if first["type"] == "json_invalid":
        return f"The request body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    path = [part for part in first["loc"] if part != "body"]
    field = ""
    for part in path:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part.replace("_", "").isalnum() and part not in ("str", "int", "NamedTool"):
            field += f".{part}" if field else part
    words = {"extra_forbidden": "is not a known parameter", "missing": "is missing"}.get(first["type"], first["msg"])
    if not field:
        return f"The request body: {words} (a JSON object is needed, sent as application/json)", None
    if field in PASSED_NAMES:
        words = f"got {shown(first['input'])}, accepted: {BY_NAME[field].kind.accepted} ({words})"
    return f"{field}: {words}", field
