"""httptools' parser of requests, for a server that speaks HTTP/1 alone. Event loop thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools


class PlainParser:
    """Reads a request that asks for another protocol as one that does not, as RFC 9110, 7.8 lets a server do.

    httptools ends such a request behind its head: it would have no body. So it is read again, without that header.
    """

    def __init__(self, connection: Any, plain_head: Callable[[], bytes]) -> None:
        """plain_head: of the request that has just ended so, b"" to read nothing more."""
        self._connection, self._plain_head = connection, plain_head
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self._connection)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: what came before is answered

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head = self._plain_head()
                data = head + data[upgrade.args[0] :] if head else b""
                self._begin()  # behind the last request of a connection the same one reads nothing

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._parser.should_upgrade()
