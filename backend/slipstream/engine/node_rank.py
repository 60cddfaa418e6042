"""The process of a rank on another node than the engine's, which `slipstream worker` starts, again and again.

Waits until the engine listens, joins it and makes its calls (rank_process.py). Ends when the connection does, when the
engine is silent for longer than node_timeout_s, or when its parent ends. Main thread; a second one asks whether the
engine is there.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from slipstream.core.errors import SlipstreamError
from slipstream.core.load_progress import LoadProgress
from slipstream.engine.build_id import build_id
from slipstream.engine.child_process import end_with
from slipstream.engine.load_watch import Report
from slipstream.engine.process_log import configure_logging
from slipstream.engine.rank_link import HANDSHAKE_TIMEOUT_S, Link, LinkError, connect, read_secret
from slipstream.engine.rank_process import RankSetup, run
from slipstream.engine.remote_ranks import CONTROL, STEPS
from slipstream.worker.process_group import WatchedStore, interface_of

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_REPEAT_S = 60.0  # how often the same reason is logged
_QUESTIONS_PER_TIMEOUT = 4
_MAX_PAUSE_S = 5.0  # between questions, which say how a load goes on


@dataclass(frozen=True)
class NodeRank:
    """Arguments of the process. local_rank: among the ranks of its node, and its GPU. model: the checkpoint here, "" if
    it has the path that it has at the engine's."""

    parent: int
    host: str
    port: int
    secret_file: str
    rank: int
    world_size: int
    local_rank: int
    model: str


class StepsConnection:
    """See rank_process.EngineConnection."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, message: Any) -> None:
        self._link.send(json.dumps(message).encode())

    def recv(self) -> Any:
        return pickle.loads(self._link.receive())  # of an end that knows the secret


class Control:
    """Questions to the engine, one at a time. Any thread. See also torch's Store, whose part it has that ranks need,
    and load_watch.LoadReports."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s
        self._lock = threading.Lock()
        self._load: tuple[LoadProgress, int] | None = None  # under way, and the id of its thread

    def begin(self, progress: LoadProgress) -> None:
        self._load = progress, threading.get_ident()

    def end(self) -> None:
        self._load = None

    def ask(self, *question: Any) -> Any:
        """Raises EOFError, OSError or LinkError if the engine is gone."""
        with self._lock:
            self._link.send(json.dumps(question).encode())
            return json.loads(self._link.receive(self._timeout_s))

    def set(self, key: str, value: Any) -> None:
        self.ask("set", key, bytes(value).hex())

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self.ask("get", key))

    def check(self, keys: list[str]) -> bool:
        return bool(self.ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        return int(self.ask("add", key, amount))

    def watch(self) -> None:
        """A thread that ends the process when the engine is gone: the main one may be stuck."""
        pause_s = min(self._timeout_s / _QUESTIONS_PER_TIMEOUT, _MAX_PAUSE_S)
        try:
            while True:
                load = self._load
                self.ask("ping", *(() if load is None else Report.of(*load).message))
                self._link.has_data(pause_s)  # or its end, which is found at once
        except (EOFError, OSError, LinkError, ValueError) as error:
            logger.error("the engine is gone: %s", error or "the connection has ended")
            sys.stderr.flush()
            os._exit(1)


def join_engine(own: NodeRank) -> tuple[Link, Control]:
    """Both connections, as soon as the engine listens."""
    process, build, said, said_at = secrets.token_hex(8), build_id(), "", 0.0
    while True:
        try:
            return _connections(own, {"process": process, "build": build})
        except (SlipstreamError, OSError, EOFError, ValueError) as error:
            reason = f"rank {own.rank} waits for the engine at {own.host}:{own.port}: {error}"
        if reason != said or time.monotonic() > said_at + _REPEAT_S:
            logger.warning("%s", reason)
            said, said_at = reason, time.monotonic()
        time.sleep(_RETRY_S)


def _connections(own: NodeRank, about: dict[str, str]) -> tuple[Link, Control]:
    """Raises LinkError, also if the engine refuses this rank, ConfigError for the secret's file, or OSError."""
    secret, links, timeout_s = read_secret(own.secret_file), [], 0.0
    try:
        for kind in (STEPS, CONTROL):
            said = {"rank": own.rank, "world_size": own.world_size, "kind": kind, **about}
            links.append(connect((own.host, own.port), secret, said))
            reply = json.loads(links[-1].receive(HANDSHAKE_TIMEOUT_S))
            if reply["refusal"]:
                raise LinkError(reply["refusal"])
            timeout_s = float(reply["timeout_s"])
    except BaseException:
        for link in links:
            link.close()
        raise
    return links[0], Control(links[1], timeout_s)


def setup_here(setup: RankSetup, own: NodeRank, link: Link) -> RankSetup:
    """What differs on this node."""
    config, hardware = setup.config, setup.hardware
    if own.model:
        config = replace(config, model=replace(config.model, model=own.model))
    if hardware.device.type == "cuda":
        hardware = replace(hardware, device=torch.device("cuda", own.local_rank))
    return replace(setup, config=config, hardware=hardware, interface=interface_of(link.local_address))


def main() -> NoReturn:
    """Argument: the fields of NodeRank as JSON."""
    own = NodeRank(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(own.parent)
    configure_logging()
    steps, control = join_engine(own)
    status = 1
    try:
        connection = StepsConnection(steps)
        setup = connection.recv()
        assert isinstance(setup, RankSetup)
        logger.info("rank %d has joined the engine at %s:%d", own.rank, own.host, own.port)
        threading.Thread(target=control.watch, name="control", daemon=True).start()
        store: dist.Store = WatchedStore(control, lambda: None)
        status = run(connection, setup_here(setup, own, steps), store, control)
    except (EOFError, OSError):
        logger.warning("the connection to the engine has ended")
    except LinkError as error:
        logger.error("%s", error)
    sys.stderr.flush()
    os._exit(status)  # not through the teardown of the process group, which waits for other ranks


if __name__ == "__main__":
    main()
