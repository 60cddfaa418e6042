"""Checks of every request before its endpoint (host, key, size, concurrency), and its metrics.

Plain ASGI, the outermost layer after CORS; event loop thread. Knows no endpoint's content.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.body_cost import reading_us
from slipstream.server.chat_page import is_page
from slipstream.server.errors import RETRY_AFTER_S, ApiError, is_of_messages
from slipstream.server.gateway import CLIENT_GONE
from slipstream.server.handover import HAND_OVER, HANDED_OVER, BusyError
from slipstream.server.hosts import HostRule
from slipstream.server.ledger import Ledger
from slipstream.server.metrics import Metrics
from slipstream.server.options import GatewayOptions
from slipstream.server.request_log import CLIENT_LEFT, RequestRecord
from slipstream.server.tenancy import Lease, Tenants
from slipstream.server.tracing import GatewayTracing
from slipstream.server.turns import MAX_READ_AT_ONCE_BYTES, Turn, Turns

logger = logging.getLogger(__name__)
MAX_READING_US = 20_000  # of a body that a worker reads on its event loop
_ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "tokenize",
    "/v1/score": "rerank",
    "/v1/rerank": "rerank",
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
    "/v1/models": "models",
}
_COUNTED = ("chat", "completions", "embeddings", "responses", "messages", "rerank", "tokenize")
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})  # and the chat page
ADMIN_PATHS = frozenset(  # with a key of their own: sleep.py, lora.py
    {"/sleep", "/wake_up", "/reload_weights", "/is_sleeping", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)


class Guard:
    def __init__(
        self, app: ASGIApp, options: GatewayOptions, metrics: Metrics, ledger: Ledger, tracing: GatewayTracing
    ) -> None:
        self._app, self._metrics, self._tracing = app, metrics, tracing
        self._tenants = Tenants(options.api_keys, options.max_priority, ledger, metrics)
        self._hosts = HostRule(options.host, options.allowed_hosts)
        self._open_paths = _OPEN_PATHS | ADMIN_PATHS if options.admin_digest else _OPEN_PATHS
        self._max_body_bytes = options.max_body_bytes
        self._max_total_body_bytes = options.max_total_body_bytes
        self._num_body_bytes = 0  # of all unanswered requests of this worker
        self._max_requests = options.max_concurrent_requests
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = RequestRecord(scope["method"], scope["path"])
        record.adopt_id(_header(scope, b"x-request-id").decode("latin-1"))
        body = _Body(scope, receive)
        answer = _Answer(send, record, body)
        endpoint = _endpoint(scope["path"])
        if endpoint in _COUNTED:
            self._tracing.begin(record, _header(scope, b"traceparent").decode("latin-1"))
        lease = self._tenants.anybody()
        try:
            self._check_host(scope, lease)
            is_open = scope["path"] in self._open_paths or is_page(scope["path"])
            if not is_open and scope["method"] != "OPTIONS":
                answer.lease = lease = self._find(scope, lease)
            self._check(scope, endpoint, lease)
            if endpoint in _COUNTED and HANDED_OVER not in scope["extensions"]:
                lease.begin()
            if endpoint not in _COUNTED or scope["method"] != "POST":
                self._begin_answer(body)
            scope.setdefault("state", {}).update(lease=lease, record=record, body=body)
            await self._app(scope, partial(self._receive, body, lease), answer)
        except ApiError as error:
            await answer.refuse(error)
        finally:
            lease.end()
            body.end()
            self._num_body_bytes -= body.num_bytes
            if body.is_answered:
                self._metrics.add("requests_in_flight", -1)
            if not body.is_handed_over:
                self._count(endpoint, record, lease)

    def _count(self, endpoint: str, record: RequestRecord, lease: Lease) -> None:
        now = time.monotonic()
        record.status = status = record.status or CLIENT_GONE
        record.key = lease.key_name
        record.write()
        if endpoint in _COUNTED:
            self._tracing.end(record, endpoint)
        self._metrics.count_request(endpoint, status)
        if endpoint in _COUNTED and status in (429, 503) and not lease.is_refused:
            lease.count_refusal("model")
        if endpoint != "other" and status == 200:
            self._metrics.observe("first_byte_seconds", endpoint, record.first_byte - record.started)
            self._metrics.observe("request_duration_seconds", endpoint, now - record.started)

    def _check_host(self, scope: Scope, nobody: Lease) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        try:
            self._hosts.check(hosts, scope["http_version"])
        except ApiError:
            nobody.count_refusal("allowed_host")
            raise

    def _find(self, scope: Scope, nobody: Lease) -> Lease:
        try:
            own = _header(scope, b"x-api-key")  # of Anthropic's clients
            return self._tenants.find(_header(scope, b"authorization") or (own and b"Bearer " + own))
        except ApiError:
            nobody.count_refusal("api_key")
            raise

    def _check(self, scope: Scope, endpoint: str, lease: Lease) -> None:
        length = _header(scope, b"content-length") or b"0"
        if length.isdigit() and (len(length) > 12 or int(length) > self._max_body_bytes):
            raise self._too_large(lease)
        coding = _header(scope, b"content-encoding").lower()
        if coding not in (b"", b"identity"):
            message = (
                f"content-encoding: got {coding.decode('latin-1')[:64]!r}, accepted: a body that is not compressed"
            )
            raise ApiError(415, message, code="unsupported_media_type")
        if endpoint in _COUNTED:
            self._check_room(lease)

    def _check_room(self, lease: Lease) -> None:
        num_before = self._metrics.total("requests_in_flight")
        if num_before >= self._max_requests:
            message = f"{num_before:.0f} requests are being answered, accepted: {self._max_requests}; try again later"
            lease.count_refusal("max_concurrent_requests")
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=1)

    def _begin_answer(self, body: _Body) -> None:
        """Count a request: one whose body does not come takes no place from those that are answered."""
        body.is_answered = True
        self._metrics.add("requests_in_flight")

    async def _receive(self, body: _Body, lease: Lease) -> Message:
        """The next part of a body. Without a correct Content-Length, the limit applies to the received bytes."""
        if body.is_complete:  # who asks for more waits for the client to leave: the request has been read
            body.end_turn()
        message = await body.receive()
        if message["type"] == "http.disconnect" and not body.is_complete:
            body.is_broken_off = True
        if message["type"] == "http.request":
            self._num_body_bytes += body.add(message.get("body", b""))
            if body.num_bytes > self._max_body_bytes:
                raise self._too_large(lease)
            if self._num_body_bytes > self._max_total_body_bytes:
                limit = f"{self._max_total_body_bytes} bytes of all requests together (--max-total-body-bytes)"
                told = f"Too many request bodies are being kept, accepted: {limit}; try again later"
                lease.count_refusal("max_total_body_bytes")
                raise ApiError(503, told, code="unavailable", retry_after_s=RETRY_AFTER_S)
            if not message.get("more_body", False):
                await self._complete(body, lease)
        return {"type": "http.disconnect"} if body.is_handed_over else message

    async def _complete(self, body: _Body, lease: Lease) -> None:
        body.is_complete = True
        try:
            await body.hand_over_if_dear()
        except BusyError:
            lease.count_refusal("reader")
            told = "Too many requests wait to be read whose bodies have very many values; try again later"
            raise ApiError(503, told, code="unavailable", retry_after_s=RETRY_AFTER_S) from None
        if body.is_handed_over:
            return
        if not body.is_answered:
            self._check_room(lease)
            self._begin_answer(body)
        if body.num_bytes > MAX_READ_AT_ONCE_BYTES:
            body.turn = await self._turns.take(lease.owner, body.num_bytes)

    def _too_large(self, lease: Lease) -> ApiError:
        lease.count_refusal("max_body_bytes")
        message = f"The request body is too large, accepted: at most {self._max_body_bytes} bytes (--max-body-bytes)"
        return ApiError(413, message, code="request_too_large")


@dataclass(slots=True)
class _Body:
    """A request's, which is kept until that is answered. num_bytes: received so far. is_broken_off: its client left
    before its end. is_answered: the request counts as one that is being answered. turn: of a large one, until the
    request has been read."""

    scope: Scope
    receive: Receive
    num_bytes: int = 0
    is_complete: bool = False
    is_broken_off: bool = False
    is_answered: bool = False
    is_handed_over: bool = False
    turn: Turn | None = None
    _parts: list[bytes] = field(default_factory=list)  # until it is complete
    _reading_us: float = 0.0

    def add(self, part: bytes) -> int:
        """Returns its length."""
        self.num_bytes += len(part)
        if HAND_OVER in self.scope["extensions"]:
            self._parts.append(part)
            self._reading_us += reading_us(part)
        return len(part)

    async def hand_over_if_dear(self) -> None:
        """Once it is complete. Raises BusyError."""
        parts, self._parts = self._parts, []
        if self._reading_us > MAX_READING_US:
            self.is_handed_over = True  # or its client has left meanwhile, and nobody answers
            try:
                self.is_handed_over = await self.scope["extensions"][HAND_OVER](self.scope, parts)
            except BusyError:
                self.is_handed_over = False
                raise

    def end(self) -> None:
        """Of its request. The connection, whose scope has this, lives until the garbage collector looks."""
        self.end_turn()
        self._parts = []

    def end_turn(self) -> None:
        if self.turn is not None:
            self.turn.end()


def _endpoint(path: str) -> str:
    """The name in limits and metrics. GET and DELETE of a kept answer count as its endpoint: both read a file."""
    return "responses" if path.startswith("/v1/responses/") else _ENDPOINTS.get(path, "other")


def _header(scope: Scope, name: bytes) -> bytes:
    """The last of that name, b"" if there is none."""
    return next((value for found, value in reversed(scope["headers"]) if found == name), b"")


class _Answer:
    """`send` that notes status and times, and names the request and what it ignores of it in headers."""

    def __init__(self, send: Send, record: RequestRecord, body: _Body) -> None:
        self._send, self._record, self._body = send, record, body
        self._has_body = False
        self.lease: Lease | None = None

    async def __call__(self, message: Message) -> None:
        if not self._has_body:
            if message["type"] == "http.response.start":
                self._body.end_turn()
                self._record.status = message["status"]
                if self._body.is_broken_off:  # what is told to nobody: that the body is no JSON
                    self._record.status, self._record.end, self._record.error = CLIENT_GONE, CLIENT_LEFT, ""
                request_id = self._record.request_id.encode()
                own = [(b"x-request-id", request_id)]
                if is_of_messages(self._record.path):
                    own.append((b"request-id", request_id))  # which Anthropic's clients read
                if self._record.warning:
                    own.append((b"warning", f'299 slipstream "{self._record.warning}"'.encode()))
                own += self.lease.headers() if self.lease is not None else ()
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            else:
                self._has_body = True
                self._record.first_byte = time.monotonic()
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        if self._record.status:
            raise error
        self._record.fail(error.message)
        body = json.dumps(error.body(self._record.path)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        if error.status_code in (413, 503):
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        if error.status_code == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self({"type": "http.response.start", "status": error.status_code, "headers": headers})
        await self({"type": "http.response.body", "body": body})
