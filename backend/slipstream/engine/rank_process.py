"""The process of a rank other than the first: makes every call of the worker that the first one makes, and decides
nothing. Its parent is the engine process, with which it ends. Main thread; while it loads, a second one reports.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from slipstream.core.config import EngineConfig
from slipstream.core.errors import SlipstreamError
from slipstream.core.load_progress import LoadProgress
from slipstream.core.start_up import StartUp
from slipstream.engine.load_watch import ConnectionReports, LoadReports
from slipstream.engine.process_log import configure_logging
from slipstream.engine.rank_processes import ANSWERED_CALLS, BROKEN, DONE, FAILED, LOADING_CALLS
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.first_launch import begin_first_launch
from slipstream.worker.hardware import Hardware, free_device_memory
from slipstream.worker.interface import Worker
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.process_group import LOOPBACK, file_store, join
from slipstream.worker.worker import ModelWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSetup:
    """What a rank is started with. hardware: its own. store_path: see process_group.file_store; ranks of other nodes
    reach it through the engine. interface: the one of this node to the others."""

    config: EngineConfig
    spec: DecoderSpec
    hardware: Hardware
    store_path: str = ""
    interface: str = LOOPBACK


class EngineConnection(Protocol):
    """To the engine: a Connection, or that of another node."""

    def send(self, message: Any) -> None: ...

    def recv(self) -> Any: ...


def load(connection: EngineConnection, setup: RankSetup, store: dist.Store, progress: LoadProgress) -> Worker:
    """Say hello, join, report free memory, receive the plan, load."""
    connection.send(("hello", None))
    phases = StartUp()
    begin_first_launch(setup.hardware.device, phases)
    hardware = join(store, setup.hardware, setup.config.model.deterministic, setup.interface)
    hardware = replace(hardware, parallel=replace(hardware.parallel, progress=progress))
    connection.send(("memory", free_device_memory(hardware)))
    plan = connection.recv()
    assert isinstance(plan, MemoryPlan)
    worker = ModelWorker(setup.config, setup.spec, hardware, plan, phases)
    connection.send(("ready", None))
    return worker


@torch.inference_mode()
def serve(connection: EngineConnection, worker: Worker, reports: LoadReports, progress: LoadProgress) -> None:
    """Make the first rank's calls until it closes the connection. What they return is the first rank's to use."""
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        if name in LOADING_CALLS:
            reports.begin(progress)
        getattr(worker, name)(*arguments)
        if name in LOADING_CALLS:
            reports.end()
        if name in ANSWERED_CALLS:
            connection.send((DONE, None))


def run(connection: EngineConnection, setup: RankSetup, store: dist.Store, reports: LoadReports) -> int:
    """The exit status. Raises EOFError or OSError if the engine gives up its load, whose reason it tells itself."""
    progress = LoadProgress()
    try:
        reports.begin(progress)
        worker = load(connection, setup, store, progress)
        reports.end()
    except EOFError:
        raise
    except Exception as error:
        if not isinstance(error, SlipstreamError):
            logger.exception("rank %d cannot load", setup.hardware.parallel.number)
        connection.send((BROKEN if _is_of_a_call(error) else FAILED, str(error)))
        return 1
    try:
        serve(connection, worker, reports, progress)
    except Exception:
        logger.exception("rank %d failed", setup.hardware.parallel.number)
        return 1
    return 0


def _is_of_a_call(error: Exception) -> bool:
    """Whether a call between ranks has failed, as it does on all of them when one has ended."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(dist.__name__)


def main() -> NoReturn:
    """What rank_main.py goes on with, and its arguments."""
    configure_logging()
    if logging.getLogger().level == logging.INFO:
        logging.getLogger().setLevel(logging.WARNING)  # the first rank says the same
    status = 1
    try:
        connection: Connection = Connection(int(sys.argv[1]))
        setup = connection.recv()
        assert isinstance(setup, RankSetup)
        limit_s = setup.config.parallel.rank_load_timeout_s
        reports = ConnectionReports(Connection(int(sys.argv[3])), limit_s)
        status = run(connection, setup, file_store(setup.store_path, setup.hardware), reports)
    except (EOFError, OSError):
        status = 0  # the engine is gone
    sys.stderr.flush()
    os._exit(status)  # not through the teardown of the process group, which waits for other ranks
