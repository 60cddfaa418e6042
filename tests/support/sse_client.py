"""Many HTTP generate_stream requests at once over raw sockets; every event is counted, no library could hide a loss."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from patience import PATIENCE_S


@dataclass
class Stream:
    """What one request received.  is_complete: the server ended the (chunked) body in good order."""

    events: list[dict[str, object]] = field(default_factory=list)
    status: int = 0
    is_complete: bool = False

    def texts(self) -> list[str]:
        return [str(event["text_output"]) for event in self.events if "text_output" in event]

    def errors(self) -> list[str]:
        return [str(event["error"]) for event in self.events if "error" in event]


def stream_many(
    url: str, model: str, bodies: list[dict[str, object]], timeout_s: float = 2 * PATIENCE_S
) -> list[Stream]:
    """POST every body to the model's generate_stream at once.  A stream that hangs is returned incomplete."""
    return asyncio.run(_stream_many(url, model, bodies, timeout_s))


async def _stream_many(url: str, model: str, bodies: list[dict[str, object]], timeout_s: float) -> list[Stream]:
    streams = [Stream() for _ in bodies]
    tasks = [asyncio.create_task(_stream_one(url, model, body, stream)) for body, stream in zip(bodies, streams)]
    _, pending = await asyncio.wait(tasks, timeout=timeout_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return streams


async def _stream_one(url: str, model: str, body: dict[str, object], stream: Stream) -> None:
    host, port = url.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        data = json.dumps(body).encode()
        head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: {url}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        headers = await reader.readuntil(b"\r\n\r\n")
        stream.status = int(headers.split()[1])
        pending = b""
        while (size := int((await reader.readline()).strip() or b"0", 16)) > 0:
            pending += await reader.readexactly(size)
            await reader.readexactly(2)
            *events, pending = pending.split(b"\n\n")
            stream.events += [json.loads(event[len(b"data: ") :]) for event in events if event.startswith(b"data: ")]
        stream.is_complete = not pending
    finally:
        writer.close()
