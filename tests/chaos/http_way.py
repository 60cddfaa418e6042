"""Requests over raw sockets, to Triton's HTTP and to the gateway: nothing between the test and what the server sent."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from asked import Asked
from outcome import Outcome

SLOW_READER_BUFFER = 2048
SLOW_READER_WAIT_S = 0.15
Body = dict[str, Any]


class Exchange:
    """One POST on a connection of its own; `lines` ends when the server has ended the body in good order."""

    def __init__(self, address: str, path: str, body: Body, patience_s: float, receive_buffer: int = 0) -> None:
        host, port = address.split(":")
        self._socket = socket.socket()
        if receive_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(patience_s)
        self._socket.connect((host, int(port)))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        self._file = self._socket.makefile("rb")
        self.status, self._headers = 0, {}

    def lines(self) -> Iterator[bytes]:
        """Lines of the body.  Raises ConnectionError when it ends before its end."""
        self.status = int((self._file.readline() or b"- 0").split()[1])
        if self.status == 0:
            raise ConnectionError("closed without an answer")
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            self._headers[name.lower()] = value.strip()
        pending = b""
        for part in self._parts():
            *whole, pending = (pending + part).split(b"\n")
            yield from whole
        if pending:
            yield pending

    def _parts(self) -> Iterator[bytes]:
        if self._headers.get("transfer-encoding") != "chunked":
            length = int(self._headers.get("content-length", 0))
            data = self._file.read(length)
            if len(data) < length:
                raise ConnectionError("the body ends early")
            yield data
            return
        while size_line := self._file.readline():
            size = int(size_line, 16)
            data = self._file.read(size + 2)
            if len(data) < size + 2:
                raise ConnectionError("a chunk ends early")
            if size == 0:
                return
            yield data[:size]
        raise ConnectionError("the body ends without its last chunk")

    def close(self, reset: bool = False) -> None:
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._file.close()
        self._socket.close()


def triton_body(asked: Asked) -> Body:
    settings = {**asked.known.settings, **asked.extras}
    inputs = {"text_input": asked.known.prompt, "sampling_parameters": json.dumps(settings)}
    return {**inputs, "stream": asked.is_streamed, "exclude_input_in_output": True, "id": asked.request_id}


def gateway_body(asked: Asked) -> Body:
    settings = {**asked.known.settings, **asked.extras}
    if (drafts := settings.pop("num_draft_tokens", None)) is not None:
        settings["speculation"] = {"num_draft_tokens": drafts}
    body = {**settings, "model": asked.model, "stream": asked.is_streamed}
    if not asked.way.startswith("chat"):
        return {**body, "prompt": asked.known.prompt}
    if (logprobs := body.pop("logprobs", None)) is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    return {**body, "messages": [{"role": "user", "content": asked.known.prompt}]}


def read_triton(event: Body, outcome: Outcome) -> None:
    """One JSON object of generate or generate_stream."""
    if "error" in event:
        outcome.error = str(event["error"])
    elif "text_output" in event:
        texts = event["text_output"]
        if isinstance(texts, list):
            outcome.texts = list(texts)
        else:
            outcome.add(int(event.get("sequence_index", 0)), texts)


def read_gateway(event: Body, outcome: Outcome) -> None:
    if "error" in event:
        outcome.error = json.dumps(event["error"])
    for choice in event.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        outcome.add(choice["index"], part.get("content") or "")


def over_http(asked: Asked, http_url: str, gateway_url: str, patience_s: float) -> Outcome:
    """Ask and receive, to the end that is asked for."""
    if asked.way.startswith("http"):
        verb = "generate_stream" if asked.is_streamed else "generate"
        address, path, body, read = http_url, f"/v2/models/{asked.model}/{verb}", triton_body(asked), read_triton
    else:
        path = "/v1/chat/completions" if asked.way.startswith("chat") else "/v1/completions"
        address, body, read = urlsplit(gateway_url).netloc, gateway_body(asked), read_gateway
    outcome = Outcome(asked)
    is_slow = asked.ending == "slow reader"
    try:
        exchange = Exchange(address, path, body, patience_s, SLOW_READER_BUFFER if is_slow else 0)
    except OSError as error:
        outcome.end(f"no connection: {error}")
        return outcome
    try:
        _receive(exchange, asked, outcome, read)
    except TimeoutError:
        outcome.end(f"no answer in {patience_s:.0f} s")
        outcome.is_overdue = True
    except (OSError, ValueError) as error:
        outcome.end(f"{type(error).__name__}: {error}")
    finally:
        exchange.close(reset=asked.ending == "reset")
    return outcome


def _receive(exchange: Exchange, asked: Asked, outcome: Outcome, read: Callable[[Body, Outcome], None]) -> None:
    num_events = 0
    if asked.ending in ("close", "reset") and asked.after == 0:
        time.sleep(0.02)
        outcome.cut()
        return
    for line in exchange.lines():
        if asked.is_streamed and line.startswith(b"data:"):  # an error in the place of the first event, too
            line = line[len(b"data:") :].strip()
            if line == b"[DONE]":
                outcome.num_finals += 1
                continue
        if not line.strip():
            continue
        read(json.loads(line), outcome)
        outcome.received()
        num_events += 1
        if asked.ending in ("close", "reset") and num_events >= asked.after and not outcome.error:
            outcome.cut()
            return
        if asked.ending == "slow reader":
            time.sleep(SLOW_READER_WAIT_S)
    if not (asked.is_through_gateway and asked.is_streamed):
        outcome.num_finals += 1  # the body has ended in good order
    if exchange.status != 200 and not outcome.error:
        outcome.error = f"status {exchange.status} without an error"
    outcome.end(outcome.error)
