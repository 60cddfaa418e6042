"""The engine's side of ranks on other nodes: it listens for them, and has two connections to each (rank_link.py).

One carries steps. The other is a request and an answer at a time, by a thread of its own: the rank asks at least every
node_timeout_s / 4, which shows both ends that the other is there, and says how its load goes on. By it the rank reaches
the store in which ranks meet, so that torch.distributed opens none to the network. What a rank sends is JSON; only the
engine's messages are pickled.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from slipstream.core.config import ParallelConfig
from slipstream.core.errors import ConfigError, EngineError
from slipstream.engine.build_id import build_id
from slipstream.engine.load_watch import Report
from slipstream.engine.rank_link import HANDSHAKE_TIMEOUT_S, Link, LinkError, accept, read_secret
from slipstream.engine.rank_processes import value_of

logger = logging.getLogger(__name__)

STEPS, CONTROL = "steps", "control"
_MAX_STRANGERS = 16  # connections that have not proved yet that they know the secret
_MAX_KEYS = 64  # of a question to the store
_ACCEPT_PERIOD_S = 0.2


@dataclass(frozen=True)
class Joined:
    """Both connections of a rank's process."""

    number: int
    steps: Link
    control: Link


class RemoteRank:
    """A rank of another node. See rank_processes.RankProcess, whose methods it has."""

    def __init__(self, joined: Joined, store: dist.Store, timeout_s: float) -> None:
        self.number = joined.number
        self._steps, self._control = joined.steps, joined.control
        self._store, self._timeout_s = store, timeout_s
        self._loss = ""
        self._report: Report | None = None
        threading.Thread(target=self._answer, name=f"rank {self.number}", daemon=True).start()

    def begin(self, setup: object) -> None:
        """See RankProcess.begin."""
        self.send(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL))

    def send(self, message: bytes) -> None:
        try:
            self._steps.send(message)
        except OSError:
            self._lose(f"the connection to rank {self.number} has ended")
            raise

    def receive(self, kind: str, timeout_s: float | None = None) -> Any:
        """See RankProcess.receive."""
        found = self.poll(timeout_s)
        if found is None:
            reason = self._loss or f"it has said nothing for {timeout_s} s"
            raise EngineError(f"rank {self.number}: {reason}")
        return value_of(self.number, found, kind)

    def poll(self, timeout_s: float | None) -> tuple[str, Any] | None:
        """See RankProcess.poll."""
        try:
            if not self._steps.has_data(timeout_s):
                return None
            kind, value = json.loads(self._steps.receive(self._timeout_s))
            return str(kind), value
        except (EOFError, OSError, ValueError):
            self._lose(f"the connection to rank {self.number} has ended")
            return None
        except LinkError as error:
            self._lose(f"rank {self.number}: {error}")
            return None

    def report(self) -> Report | None:
        """See RankProcess.report."""
        report, self._report = self._report, None
        return report

    def loss(self) -> str:
        """See RankProcess.loss."""
        return self._loss

    def kill(self) -> None:
        """Ends its process, which sees that the connections end, or else that nobody answers. Any thread."""
        for link in (self._steps, self._control):
            link.shut_down()

    def hang_up(self) -> None:
        """See RankProcess.hang_up."""
        self.kill()

    # ---- the rank's own thread

    def _answer(self) -> None:
        try:
            while True:
                question = json.loads(self._control.receive(self._timeout_s))
                self._control.send(json.dumps(_answer(self._store, question)).encode())
                if question[0] == "ping" and len(question) > 1:
                    self._report = Report.received(*question[1:])
        except TimeoutError:
            self._lose(f"rank {self.number} has not been heard of for {self._timeout_s:g} s (node_timeout_s)")
        except (EOFError, OSError):
            self._lose(f"the connection to rank {self.number} has ended")
        except (EngineError, ValueError, TypeError, RuntimeError) as error:
            self._lose(f"rank {self.number} has asked for what it may not: {error}")

    def _lose(self, reason: str) -> None:
        self._loss = self._loss or reason


def _answer(store: dist.Store, question: Any) -> Any:
    """Raises ValueError or TypeError for what is no question. Values are hexadecimal."""
    name, *arguments = question
    if name == "ping":
        return None
    if name == "set":
        return store.set(str(arguments[0]), bytes.fromhex(arguments[1]))  # type: ignore[arg-type]
    if name == "get" and store.check([str(arguments[0])]):
        return store.get(str(arguments[0])).hex()
    if name == "check" and len(arguments[0]) <= _MAX_KEYS:
        return store.check([str(key) for key in arguments[0]])
    if name == "add":
        return store.add(str(arguments[0]), int(arguments[1]))
    raise ValueError(f"{name!r}")


class Listener:
    """Listens for the ranks of other nodes until all have come, by a thread of its own and one a connection.

    Raises ConfigError for an address that cannot be listened at. numbers: of the ranks that are to come.
    """

    def __init__(self, config: ParallelConfig, numbers: range) -> None:
        self._config, self._numbers = config, numbers
        self._secret, self._build = read_secret(config.rank_secret_file), build_id()
        host, port = split_address(config.rank_address)
        try:
            self._socket = socket.create_server((host, port), family=_family(host), backlog=_MAX_STRANGERS)
        except OSError as error:
            accepted = f"{error.strerror or error}; accepted: an address of this machine with a free port"
            raise ConfigError("rank_address", config.rank_address, accepted) from error
        self._socket.settimeout(_ACCEPT_PERIOD_S)
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._changed = threading.Condition()
        self._links: dict[tuple[int, str, str], Link] = {}  # by rank, process and kind
        self._joined: dict[int, Joined] = {}
        self._is_closed = False
        self._refused_at, self._refused = 0.0, ""  # when that was logged last, and why no rank came last
        self._thread = threading.Thread(target=self._accept, name="nodes", daemon=True)
        self._thread.start()

    def wait(self, check: Callable[[], None]) -> list[Joined]:
        """All ranks, in order. check: may raise, while they are waited for. Raises EngineError if some do not come."""
        limit = time.monotonic() + self._config.node_start_timeout_s
        logger.info("waiting for ranks %s of other nodes at %s", _numbers(self._numbers), self._config.rank_address)
        with self._changed:
            while missing := [number for number in self._numbers if number not in self._joined]:
                check()
                if time.monotonic() > limit:
                    waited = f"in {self._config.node_start_timeout_s:g} s (node_start_timeout_s)"
                    reason = self._refused or "does `slipstream worker` run on each other node?"
                    raise EngineError(
                        f"ranks {_numbers(missing)} have not come to {self._config.rank_address} {waited}: {reason}"
                    )
                self._changed.wait(_ACCEPT_PERIOD_S)
            return [self._joined[number] for number in self._numbers]

    def close(self) -> None:
        """Listen no more; ranks that have come stay connected."""
        with self._changed:
            self._is_closed = True
            kept = {id(link) for joined in self._joined.values() for link in (joined.steps, joined.control)}
            for link in self._links.values():
                if id(link) not in kept:
                    link.shut_down()
        self._thread.join()  # the port is in use while it waits there
        self._socket.close()

    # ---- threads

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # such as too many open files
                self._note(f"no connection can be accepted: {error}")
                time.sleep(_ACCEPT_PERIOD_S)
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._greet, args=(connection, address), name="greeting", daemon=True).start()
            except RuntimeError as error:  # no more threads: others may end
                self._refuse(address, str(error))
                connection.close()
                self._strangers.release()

    def _greet(self, connection: socket.socket, address: Any) -> None:
        try:
            connection.settimeout(HANDSHAKE_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link, said = accept(connection, self._secret)
            connection.settimeout(None)
            refusal = self._refusal(said)
            if refusal:
                self._refuse(address, refusal)
            reply = {"refusal": refusal, "timeout_s": self._config.node_timeout_s}
            link.send(json.dumps(reply).encode())  # before another thread has the link
            if refusal or not self._add(link, said["rank"], str(said.get("process")), said["kind"]):
                link.close()
        except (LinkError, EOFError, OSError, ValueError) as error:
            self._refuse(address, str(error) or "it has ended")
            connection.close()
        finally:
            self._strangers.release()

    def _refuse(self, address: Any, reason: str) -> None:
        self._note(f"the last connection, of {address[0]}, was refused: {reason}")

    def _note(self, reason: str) -> None:
        """Why no rank has come. Logged once in a while: strangers may come often."""
        self._refused = reason
        if time.monotonic() > self._refused_at + HANDSHAKE_TIMEOUT_S:
            self._refused_at = time.monotonic()
            logger.warning("rank_address=%s: %s", self._config.rank_address, reason)

    def _refusal(self, said: dict[str, Any]) -> str:
        """Why the rank cannot join, or ""."""
        number, size, wanted = said.get("rank"), said.get("world_size"), self._config.num_ranks
        if (build := said.get("build")) != self._build:
            return f"it runs Slipstream {build}, the engine {self._build}: the same on all nodes is accepted"
        if size != wanted:
            each = wanted // self._config.num_nodes
            return f"the model has {wanted} ranks, not {size}: --ranks {each} on each of {self._config.num_nodes} nodes"
        if not isinstance(number, int) or number not in self._numbers or said.get("kind") not in (STEPS, CONTROL):
            return f"rank {number}: ranks of other nodes are {_numbers(self._numbers)}"
        return ""

    def _add(self, link: Link, number: int, process: str, kind: str) -> bool:
        """Whether it is still waited for. A rank's latest process counts: an earlier one may have ended."""
        with self._changed:
            if self._is_closed:
                return False
            for key in [key for key in self._links if key[0] == number and key[1] != process]:
                self._links.pop(key).shut_down()
                self._joined.pop(number, None)
            self._links[number, process, kind] = link
            steps, control = (self._links.get((number, process, one)) for one in (STEPS, CONTROL))
            if steps is not None and control is not None:
                self._joined[number] = Joined(number, steps, control)
                self._changed.notify_all()
        return True


def split_address(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not 0 < int(port) < 1 << 16:
        raise ValueError(address)
    return host.strip("[]"), int(port)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _numbers(numbers: range | list[int]) -> str:
    return ", ".join(map(str, numbers))
