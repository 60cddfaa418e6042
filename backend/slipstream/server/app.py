"""The gateway as an ASGI application: routes, and every error in OpenAI's form.

One per worker process, on its event loop. What the endpoints do is in chat.py, completions.py and embeddings.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import slipstream
from slipstream.core.errors import drop_locals
from slipstream.server.chat import chat
from slipstream.server.chat_page import PREFIX, answer, read_page
from slipstream.server.completions import complete
from slipstream.server.embeddings import cards, embed
from slipstream.server.errors import ApiError, error_body, model_not_found
from slipstream.server.gateway import Gateway
from slipstream.server.guard import Guard
from slipstream.server.ledger import Ledger, make_ledger
from slipstream.server.lora import add_lora
from slipstream.server.messages.endpoint import count_tokens, send
from slipstream.server.messages.schemas import CountTokensRequest, MessagesRequest
from slipstream.server.metrics import Metrics, fetch, make_file
from slipstream.server.notes import note, note_messages, note_tools
from slipstream.server.options import GatewayOptions
from slipstream.server.ranking import rerank, score
from slipstream.server.readiness import ready_models
from slipstream.server.responses.endpoint import delete, respond, retrieve
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.responses.store import ResponseStore
from slipstream.server.sampling import naming_fields_as_asked
from slipstream.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ErrorBody,
    MessagesErrorBody,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from slipstream.server.shared_call import SharedCall, SharedTask
from slipstream.server.sleep import add_sleep
from slipstream.server.sse import to_json
from slipstream.server.tokenize import detokenize, tokenize
from slipstream.server.tracing import GatewayTracing, make_tracing
from slipstream.server.validation import explain

logger = logging.getLogger(__name__)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 421, 429, 500, 503, 504)
}
_STREAMED = {**_ERRORS, 200: {"content": {"application/json": {}, "text/event-stream": {}}}}
_MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": MessagesErrorBody} for status in _ERRORS}
_TICK_S = 0.25
_TOLD_PATH_CHARS = 200
_UNREADABLE = "The request body cannot be read as JSON: it is not UTF-8, nested too deeply or has an endless number"
_CODES = {400: "invalid_value", 404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


@dataclass(frozen=True)
class Shared:
    """Files with shared counters that all workers map."""

    metrics: Path
    ledger: Path
    responses: Path


@dataclass(frozen=True)
class Counts:
    """A worker's counters in the shared files, and the answers that all workers keep."""

    metrics: Metrics
    ledger: Ledger
    store: ResponseStore


def make_shared(folder: Path, options: GatewayOptions) -> Shared:
    metrics = make_file(folder, options.num_processes, _names(options))
    (folder / "responses").mkdir(mode=0o700)
    ledger = make_ledger(folder / "ledger", len(options.api_keys), options.num_processes)
    return Shared(metrics, ledger, folder / "responses")


def open_counts(options: GatewayOptions, shared: Shared | None) -> Counts:
    """shared: None for a process on its own."""
    metrics = Metrics(shared.metrics if shared else None, _names(options))
    folder, most_bytes = shared.responses if shared else None, options.max_stored_bytes
    store = ResponseStore(folder, most_bytes, options.stored_response_ttl_s, options.num_processes)
    return Counts(metrics, Ledger(len(options.api_keys), shared.ledger if shared else None), store)


def _names(options: GatewayOptions) -> list[str]:
    return [key.name for key in options.api_keys]


def create_app(options: GatewayOptions, counts: Counts, announces: bool = False, is_reader: bool = False) -> FastAPI:
    """announces: log once what is served where. is_reader: its event loop may be late."""
    metrics, tracing = counts.metrics, make_tracing(options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway = app.state.gateway = Gateway(options, metrics, counts.store)
        tasks = [asyncio.create_task(_tick(gateway, tracing, tells_lag=not is_reader))]
        if announces:
            tasks.append(asyncio.create_task(_announce(gateway)))
        yield
        for task in tasks:
            task.cancel()
        await gateway.close()
        if tracing.tracer is not None:
            await asyncio.to_thread(tracing.tracer.close)

    app = FastAPI(
        title="Slipstream gateway",
        version=slipstream.__version__,
        description="OpenAI's API in front of Triton Inference Server.",
        lifespan=lifespan,
        openapi_url=None,  # FastAPI would make the schema on the event loop
    )
    _add_generation(app)
    _add_other_apis(app)
    _add_tokens(app)
    _add_models(app)
    _add_operations(app, options, metrics)
    if options.admin_digest:
        add_sleep(app, options.admin_digest, _ERRORS)
        add_lora(app, options.admin_digest, _ERRORS)
    if options.has_page:
        _add_page(app)
    _add_error_handlers(app)
    app.add_middleware(Guard, options=options, metrics=metrics, ledger=counts.ledger, tracing=tracing)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_generation(app: FastAPI) -> None:
    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        await note_messages(body, request)
        with naming_fields_as_asked(body):
            return await chat(request.app.state.gateway, body, request)

    @app.post("/v1/completions", responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        await note(body, request)
        with naming_fields_as_asked(body):
            return await complete(request.app.state.gateway, body, request)

    @app.post("/v1/embeddings", responses=_ERRORS)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        await note(body, request)
        return await embed(request.app.state.gateway, body, request)

    @app.post("/v1/score", responses=_ERRORS)
    async def scores(body: ScoreRequest, request: Request) -> Response:
        await note(body, request)
        return JSONResponse(await score(request.app.state.gateway, body, request))

    @app.post("/v1/rerank", responses=_ERRORS)
    async def ranks(body: RerankRequest, request: Request) -> Response:
        await note(body, request)
        return JSONResponse(await rerank(request.app.state.gateway, body, request))


def _add_other_apis(app: FastAPI) -> None:
    @app.post("/v1/responses", responses=_STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        await note(body, request)
        await note_tools(body, request)
        with naming_fields_as_asked(body):
            return await respond(request.app.state.gateway, body, request)

    @app.get("/v1/responses/{response_id:path}", responses=_ERRORS)
    async def response(response_id: str, request: Request) -> Response:
        return await retrieve(request.app.state.gateway, response_id, request)

    @app.delete("/v1/responses/{response_id:path}", responses=_ERRORS)
    async def delete_response(response_id: str, request: Request) -> Response:
        return await delete(request.app.state.gateway, response_id, request)

    @app.post("/v1/messages", responses={**_STREAMED, **_MESSAGES_ERRORS})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        await note(body, request)
        await note_tools(body, request)
        with naming_fields_as_asked(body):
            return await send(request.app.state.gateway, body, request)

    @app.post("/v1/messages/count_tokens", responses=_MESSAGES_ERRORS)
    async def message_tokens(body: CountTokensRequest, request: Request) -> Response:
        await note(body, request)
        return await count_tokens(request.app.state.gateway, body, request)


def _add_tokens(app: FastAPI) -> None:
    @app.post("/tokenize", responses=_ERRORS)
    async def token_ids(body: TokenizeRequest, request: Request) -> Response:
        await note_messages(body, request)
        return await tokenize(request.app.state.gateway, body, request)

    @app.post("/detokenize", responses=_ERRORS)
    async def text(body: DetokenizeRequest, request: Request) -> Response:
        await note(body, request)
        return await detokenize(request.app.state.gateway, body, request.state.lease.owner)


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
    @app.head("/health", include_in_schema=False)  # load balancers ask so
    @app.get("/health")
    async def health() -> Response:
        """The gateway's process is alive."""
        return JSONResponse({"status": "ok"})

    now = SharedTask[list[str]]()  # a model that may sleep is asked itself

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses={503: {"model": ErrorBody}})
    async def ready(request: Request) -> Response:
        """Triton answers and at least one model is ready."""
        names = await now.result(partial(ready_models, request.app.state.gateway))
        return JSONResponse({"status": "ready", "models": names})

    of_triton = SharedCall(partial(fetch, options.metrics_url))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """The gateway's metrics, then Triton's if metrics_url is set."""
        text = await of_triton.result() if options.metrics_url else ""
        return PlainTextResponse(metrics.render() + text, media_type="text/plain; version=0.0.4")

    schema = SharedCall(lambda: to_json(app.openapi()).encode(), is_kept=True)  # takes 0.3 s, the first time

    async def show_schema(request: Request) -> Response:
        return Response(await schema.result(), media_type="application/json")

    app.add_route("/openapi.json", show_schema, include_in_schema=False)


def _add_page(app: FastAPI) -> None:
    files = read_page()

    async def page(request: Request, name: str = "") -> Response:
        return answer(files, name, request)

    for path in ("/", f"{PREFIX}{{name:path}}"):
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)


async def _announce(gateway: Gateway) -> None:
    """Log one line once Triton has a model that is ready."""
    options = gateway.options
    while True:
        try:
            names = [_served(card) for card in await _cards(gateway)]
        except ApiError:
            names = []
        if names:
            break
        await asyncio.sleep(1.0)
    url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{options.port}"
    page = f", chat page at {url}" if options.has_page else ""
    logger.info("ready: %s/v1 serves %s of Triton at %s%s", url, ", ".join(names), options.triton_url, page)


def _served(card: dict[str, Any]) -> str:
    """A model's name and what it is for."""
    if card["task"] != "generate":
        return f"{card['id']} ({card['task']})"
    return f"{card['id']} ({'chat' if card['has_chat_template'] else 'completions'})"


async def _tick(gateway: Gateway, tracing: GatewayTracing, tells_lag: bool) -> None:
    """Four times a second: collect the counts of streams and the lag of the event loop."""
    pace, metrics = gateway.pace, gateway.metrics
    while True:
        due = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        metrics.set("loop_lag_seconds", max(0.0, time.monotonic() - due) if tells_lag else 0.0)
        metrics.set("streams_in_flight", pace.num_streams)
        for name, value in (
            ("stream_events_total", pace.num_events),
            ("stream_tokens_total", pace.num_tokens),
            ("disconnects_total", pace.num_disconnects),
        ):
            metrics.add(name, value - pace.reported.get(name, 0))
            pace.reported[name] = value
        if tracing.tracer is not None:
            for name, count in zip(("spans_exported_total", "spans_dropped_total"), tracing.tracer.take_counts()):
                metrics.add(name, count)


# ---------------------------------------------------------------- errors


def _told_of(request: Request, error: HTTPException) -> str:
    """In place of FastAPI's own words, which give no reason."""
    path = request.url.path[:_TOLD_PATH_CHARS]
    return {
        400: _UNREADABLE,
        404: f"There is no {path} here; GET /openapi.json lists the paths",
        405: f"{path} does not take {request.method}; accepted: {(error.headers or {}).get('Allow', 'another method')}",
    }.get(error.status_code, str(error.detail))


def _add_error_handlers(app: FastAPI) -> None:
    """FastAPI's own errors and the frames that raise them keep each other, and the request's body with them, until the
    garbage collector looks: a hundred bodies of 4 MiB that are no JSON were 0.8 GB. So the frames forget them here."""

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            request.state.record.fail(error.message)
            return JSONResponse(error.body(request.scope["path"]), error.status_code, headers=error.headers)
        drop_locals(error)
        told = _told_of(request, error)
        body = error_body(request.scope["path"], error.status_code, told, _CODES.get(error.status_code))
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        message, param = explain(error.errors())
        drop_locals(error)
        request.state.record.fail(message)
        return JSONResponse(error_body(request.scope["path"], 400, message, "invalid_value", param), 400)

    @app.exception_handler(UnicodeEncodeError)
    async def refuse_text(request: Request, error: UnicodeEncodeError) -> Response:
        told = "The request has text that is not valid Unicode (half a surrogate)"
        return JSONResponse(error_body(request.scope["path"], 400, told), 400)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        request.state.record.fail("the gateway failed")
        told = "The gateway failed; its log says why"
        return JSONResponse(error_body(request.scope["path"], 500, told, "internal_error"), 500)
