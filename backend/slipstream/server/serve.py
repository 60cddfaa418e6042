"""Run the gateway: one process, or several behind one listening socket. Called by `slipstream serve-openai`.

The parent of several workers only holds the socket and starts workers, again when one died.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import signal
import tempfile
import threading
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from socket import socket

import uvicorn

from slipstream.server.app import Counts, Shared, create_app, make_shared, open_counts
from slipstream.server.connection import BoundedConnection, GatewayConfig
from slipstream.server.options import GatewayOptions

logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 75
_CHECK_S = 0.5


def serve(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT; in-flight requests then get options.shutdown_timeout_s."""
    _raise_file_limit(options.max_connections * 2 + 256)
    with tempfile.TemporaryDirectory(prefix="slipstream-gateway-") as folder:
        shared = make_shared(Path(folder), options)
        listening = make_config(options, open_counts(options, None)).bind_socket()
        if options.workers == 1:
            _work(options, shared, listening)
        else:
            _supervise(options, shared, listening)


def make_config(options: GatewayOptions, counts: Counts) -> GatewayConfig:
    return GatewayConfig(
        options,
        counts.metrics,
        app=partial(create_app, options, counts),
        factory=True,
        host=options.host,
        port=options.port,
        http=BoundedConnection,
        ws="none",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=options.shutdown_timeout_s,
        log_level=options.log_level,
    )


def _work(options: GatewayOptions, shared: Shared, listening: socket) -> None:
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    uvicorn.Server(make_config(options, open_counts(options, shared))).run(sockets=[listening])


def _supervise(options: GatewayOptions, shared: Shared, listening: socket) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    context = multiprocessing.get_context("spawn")

    def start() -> SpawnProcess:
        worker = context.Process(target=_work, args=(options, shared, listening))
        worker.start()
        return worker

    workers = [start() for _ in range(options.workers)]
    while not stop.wait(_CHECK_S):
        for index, worker in enumerate(workers):
            if not worker.is_alive():
                logger.error("worker %s ended with %s: starting another", worker.pid, worker.exitcode)
                workers[index] = start()
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(options.shutdown_timeout_s + 5)
        worker.kill()


def _raise_file_limit(wanted: int) -> None:
    """Every connection is a file; many systems start processes with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))
