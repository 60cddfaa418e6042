"""A process of its own that reads the bodies which would stop an event loop for long, and answers their requests.

It is a worker whose connections come from the others (handover.py), started when the first one comes. A thread of the
gateway's first process starts it, and at once again when it died: until then, what it had under way counts (ledger.py).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

import uvicorn

from slipstream.server.connection import BoundedConnection, GatewayConfig
from slipstream.server.handover import take

logger = logging.getLogger(__name__)
_CHECK_S = 0.5
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class HandedConnection(BoundedConnection):
    """One that was handed over with its request, and ends with the answer. Nothing that comes behind it is read."""

    def read_request(self, request: bytes) -> None:
        super().data_received(request)

    def data_received(self, data: bytes) -> None:
        """To the parser it would be an error, which ends the answer."""


class ReaderServer(uvicorn.Server):
    """Serves what comes through `queue`, until the process that started it is gone."""

    def __init__(self, config: GatewayConfig, queue: socket.socket) -> None:
        super().__init__(config)
        self._gateway_config, self._queue = config, queue
        self._taking = set[asyncio.Task[None]]()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        asyncio.get_running_loop().add_reader(self._queue, self._take_one)

    async def main_loop(self) -> None:
        """Only now an end is one of this loop: it waits for a reader that starts, with all that was given to that."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
        await super().main_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What was given before is served, too."""
        asyncio.get_running_loop().remove_reader(self._queue)
        await asyncio.gather(*self._taking, return_exceptions=True)
        while self._has_more():
            await self._serve_one()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        parent = multiprocessing.parent_process()
        return await super().on_tick(counter) or (parent is not None and not parent.is_alive())

    def _take_one(self) -> None:
        """One at a time: the others' bodies stay with those who have them."""
        asyncio.get_running_loop().remove_reader(self._queue)
        task = asyncio.get_running_loop().create_task(self._serve_one())
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    def _has_more(self) -> bool:
        try:
            return self._queue.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return False

    async def _serve_one(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            taken = await take(self._queue)
            if taken is not None:
                client, request = taken
                with suppress(OSError):  # it has left
                    _, connection = await loop.connect_accepted_socket(self._make_connection, client)
                    connection.read_request(request)
        finally:
            if not self.should_exit:
                loop.add_reader(self._queue, self._take_one)

    def _make_connection(self) -> HandedConnection:
        return HandedConnection(self._gateway_config, self.server_state, self.lifespan.state)


class Reader:
    """The process, as the one that starts it sees it. make: a new one, not started."""

    def __init__(self, queue: socket.socket, make: Callable[[], BaseProcess]) -> None:
        self._queue, self._make = queue, make
        self._process: BaseProcess | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="reader", daemon=True)
        self._thread.start()

    def begin_end(self) -> None:
        """Let it end what it serves."""
        self._stop.set()
        if self._process is not None:
            self._process.terminate()

    def end(self, timeout_s: float) -> None:
        self.begin_end()
        self._thread.join()
        if self._process is not None:
            self._process.terminate()
            self._process.join(timeout_s)
            self._process.kill()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._queue, select.POLLIN)
        while not self._stop.is_set():
            if self._process is not None and self._process.is_alive():
                self._process.join(_CHECK_S)
            elif self._process is None:
                if poll.poll(_CHECK_S * 1000):
                    self._start_process()
            elif not self._stop.wait(_CHECK_S):  # it has just died
                logger.error("reader %s ended with %s: starting another", self._process.pid, self._process.exitcode)
                self._start_process()
        if poll.poll(0) and (self._process is None or not self._process.is_alive()):
            self._start_process()  # what was given before the end is served, too

    def _start_process(self) -> None:
        """Later, if there is no memory or no process for it now. It begins with the signal mask of this thread."""
        process = self._make()
        try:
            resource_tracker.ensure_running()  # here: it is started with the process, and unblocks the signals then
            signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
            process.start()
        except OSError as error:
            logger.error("the reader cannot be started now: %s", error)
            self._stop.wait(_CHECK_S)
        else:
            self._process = process
