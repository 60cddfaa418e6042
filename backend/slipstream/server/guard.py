"""What every request passes before it is looked at: key, size, number at once. And where it is counted.

Plain ASGI, outermost but for CORS; event loop thread. Knows no endpoint's content.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.errors import ApiError
from slipstream.server.gateway import CLIENT_GONE
from slipstream.server.metrics import Metrics
from slipstream.server.options import GatewayOptions

logger = logging.getLogger(__name__)
_ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/models": "models",
}
_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json", "/chat.js", "/chat.css"})


class Guard:
    def __init__(self, app: ASGIApp, options: GatewayOptions, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._key_digests = [_digest(key) for key in options.api_keys]
        self._max_body_bytes = options.max_body_bytes
        self._max_requests = options.max_concurrent_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        answer = _Answer(send)
        endpoint = _ENDPOINTS.get(scope["path"], "other")
        self._metrics.add("requests_in_flight")
        try:
            self._check(scope, endpoint)
            await self._app(scope, self._bounded(receive), answer)
        except ApiError as error:
            await answer.refuse(error)
        finally:
            self._metrics.add("requests_in_flight", -1)
            self._count(endpoint, answer)

    def _count(self, endpoint: str, answer: _Answer) -> None:
        now = time.monotonic()
        status = answer.status or CLIENT_GONE
        self._metrics.count_request(endpoint, status)
        if endpoint != "other" and status == 200:
            self._metrics.observe("first_byte_seconds", endpoint, answer.first_byte - answer.started)
            self._metrics.observe("request_duration_seconds", endpoint, now - answer.started)

    def _check(self, scope: Scope, endpoint: str) -> None:
        headers = dict(scope["headers"])
        if self._key_digests and scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
            check_key(headers.get(b"authorization", b""), self._key_digests)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 12 or int(length) > self._max_body_bytes):
            raise self._too_large()
        if endpoint in ("chat", "completions", "embeddings"):
            num_before = self._metrics.total("requests_in_flight") - 1
            if num_before >= self._max_requests:
                message = (
                    f"{num_before:.0f} requests are being answered, accepted: {self._max_requests}; try again later"
                )
                raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=1)

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` that ends a body which says no length, or lies about it, at the limit."""
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        message = f"The request body is too large, accepted: at most {self._max_body_bytes} bytes (--max-body-bytes)"
        return ApiError(413, message, code="request_too_large")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_key(authorization: bytes, digests: Sequence[bytes]) -> None:
    """Raises ApiError (401). Takes the same time wherever a key is wrong: digests are compared, and all of them."""
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        message = "You did not provide an API key; send it as a header: Authorization: Bearer YOUR_KEY"
        raise ApiError(401, message, code="invalid_api_key")
    given = hashlib.sha256(key.strip()).digest()
    is_known = False
    for digest in digests:
        is_known |= hmac.compare_digest(given, digest)
    if not is_known:
        raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")


class _Answer:
    """`send` that notes status and times, and names the request in a header."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.first_byte = time.monotonic()
        self.status = 0
        self._has_body = False

    async def __call__(self, message: Message) -> None:
        if not self._has_body:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                name = (b"x-request-id", secrets.token_hex(12).encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            else:
                self._has_body = True
                self.first_byte = time.monotonic()
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        if self.status:
            raise error
        body = json.dumps(error.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        if error.status_code == 413:
            headers.append((b"connection", b"close"))  # what is left of the body is not read
        if error.status_code == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self({"type": "http.response.start", "status": error.status_code, "headers": headers})
        await self({"type": "http.response.body", "body": body})
