"""Small answers of the gateway."""

from __future__ import annotations

import asyncio
import socket

from slipstream.server.serve import listen


def test_small_answers_leave_at_once() -> None:
    """Else the kernel keeps a packet until the client has acknowledged the last one: 40 ms."""

    async def accepted() -> int:
        sent_at_once: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            sent_at_once.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listen("127.0.0.1", 0)
        async with await asyncio.start_server(note, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            found = await sent_at_once
            writer.close()
            return found

    assert asyncio.run(accepted())
