"""Answers of unknown length to clients of HTTP/1.0. Event loop thread."""

from __future__ import annotations

import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def until_the_end(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """An answer without a length to HTTP/1.0, which has no chunks (RFC 9112, 6.1): it ends where the connection does.
    uvicorn would write chunks."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open_ended = False

        async def send_whole(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if is_open_ended else None
            if is_open_ended:
                has_more = message["type"] == "http.response.start" or message.get("more_body", False)
                cycle.expected_content_length = sys.maxsize if has_more else len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_whole)

    return answer
