"""Run the gateway: one worker, or several behind one listening socket. Called by `slipstream serve-openai`.

One worker is the process itself. The parent of several only holds the socket and starts workers, again when one died.
Either starts the reader (reader.py) when a worker has a request for it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import SpawnProcess
from socket import AF_INET, AF_INET6, IPPROTO_TCP, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from slipstream.core.errors import ConfigError
from slipstream.server import request_log
from slipstream.server.app import Counts, Shared, create_app, make_shared, open_counts
from slipstream.server.connection import BoundedConnection, GatewayConfig
from slipstream.server.handover import ADDED_HEADER_BYTES, ADDED_HEADERS, make_queue
from slipstream.server.options import GatewayOptions
from slipstream.server.reader import Reader, ReaderServer
from slipstream.server.shared_folder import hold, shared_folder
from slipstream.server.workers import Workers

KEEP_ALIVE_S = 75
_CHECK_S = 0.5
_SPAWN = multiprocessing.get_context("spawn")
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 20  # of glibc's mallopt
_NEW_OBJECTS = 10_000  # between two looks of the garbage collector; a large request has 200,000 at once


def serve(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT; in-flight requests then get options.shutdown_timeout_s.

    Raises SystemExit (0) at SIGTERM. Main thread.
    """
    _raise_file_limit(options.max_connections * 2 + 256)
    signal.signal(signal.SIGTERM, _end)
    with shared_folder() as folder:
        shared = make_shared(folder, options)
        listening = listen(options.host, options.port)
        options = replace(options, port=listening.getsockname()[1])
        with _reader(options, shared) as (reader, queue):
            if options.workers == 1:
                _work(options, shared, listening, queue, announces=True, reader=reader)
            else:
                _supervise(options, shared, listening, queue, reader)


@contextmanager
def _reader(options: GatewayOptions, shared: Shared) -> Iterator[tuple[Reader, socket]]:
    """The reader, and the queue by which workers hand requests over to it."""
    giving, taking = make_queue()
    reader = Reader(taking, partial(_SPAWN.Process, target=_read, args=(options, shared, taking)))
    try:
        yield reader, giving
    finally:
        reader.end(options.shutdown_timeout_s + 5)


def _end(*_: object) -> None:
    """uvicorn raises SIGTERM again behind its shutdown: its default action would leave the shared folder there."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not end the removal
    raise SystemExit(0)


def listen(host: str, port: int) -> socket:
    """Raises ConfigError for an address that cannot be taken."""
    # asyncio sends small packets at once only on sockets that say that they are of TCP, as accepted ones then do
    listening = socket(AF_INET6 if ":" in host else AF_INET, SOCK_STREAM, IPPROTO_TCP)
    listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        why = (error.strerror or str(error)).lower()
        accepted = f"cannot listen on {host}:{port}: {why}; accepted: a free port of this machine, or 0 for any"
        raise ConfigError("port", port, accepted) from None
    listening.set_inheritable(True)
    return listening


def make_config(options: GatewayOptions, counts: Counts, queue: socket | None, announces: bool) -> GatewayConfig:
    """queue: to the reader, None in that itself."""
    return GatewayConfig(
        options,
        counts.metrics,
        queue,
        app=partial(_made_app, options, counts, announces, is_reader=queue is None),
        factory=True,
        host=options.host,
        port=options.port,
        http=BoundedConnection,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=options.shutdown_timeout_s,
        log_level=options.log_level,
    )


def _made_app(options: GatewayOptions, counts: Counts, announces: bool, is_reader: bool) -> FastAPI:
    """The app of this process. Its garbage collector passes over all that exists with it, and large blocks are mapped.

    It would stop the event loop for 50 ms each time, as often as a body of 4 MiB has objects: several times 0.1 s.
    """
    _map_large_blocks()
    app = create_app(options, counts, announces, is_reader)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    return app


def _map_large_blocks() -> None:
    """Let the process give large blocks back as soon as they are free. Else glibc maps only those of 32 MiB once it has
    freed a large one, and keeps the others for each thread: of 24 answers of 9 MB 140 MB remained."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


class _Server(uvicorn.Server):
    """reader: ends as soon as this does, where that is of this process."""

    def __init__(self, config: GatewayConfig, reader: Reader | None) -> None:
        super().__init__(config)
        self._gateway_config, self._reader = config, reader

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._gateway_config.is_ending = True
        if self._reader is not None:
            self._reader.begin_end()


def _work(
    options: GatewayOptions,
    shared: Shared,
    listening: socket,
    queue: socket,
    announces: bool,
    reader: Reader | None = None,
) -> None:
    request_log.set_up(options.log_level, options.log_format)
    hold(shared.responses.parent)
    config = make_config(options, open_counts(options, shared), queue, announces)
    _Server(config, reader).run(sockets=[listening])


def _read(options: GatewayOptions, shared: Shared, queue: socket) -> None:
    """The reader's process. What a worker has accepted is a little longer when it comes."""
    request_log.set_up(options.log_level, options.log_format)
    hold(shared.responses.parent)
    options = replace(
        options,
        max_headers=options.max_headers + ADDED_HEADERS,
        max_header_bytes=options.max_header_bytes + ADDED_HEADER_BYTES,
    )
    ReaderServer(make_config(options, open_counts(options, shared), None, announces=False), queue).run()


def _supervise(options: GatewayOptions, shared: Shared, listening: socket, queue: socket, reader: Reader) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def make(announces: bool) -> SpawnProcess:
        return _SPAWN.Process(target=_work, args=(options, shared, listening, queue, announces))

    workers = Workers(options.workers, make)
    workers.start_missing()
    while not stop.wait(_CHECK_S):
        workers.start_missing()
    workers.begin_end()  # before the reader, to which they then give nothing more
    reader.begin_end()
    workers.end(options.shutdown_timeout_s + 5)


def _raise_file_limit(wanted: int) -> None:
    """Every connection is a file; many systems start processes with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))
