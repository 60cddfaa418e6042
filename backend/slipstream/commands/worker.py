"""slipstream worker: serve the ranks of this machine for a model that an engine on another machine serves.

Needs to know where the engine listens (rank_address), the secret of both (rank_secret_file) and which ranks are here.
Takes what is not given from the variables of torchrun (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK: one rank
a process) or of a Kubernetes LeaderWorkerSet (LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX: --ranks a pod).
Waits for the engine, joins it again when it starts again, and ends with SIGTERM: at once, or with --drain-timeout once
the engine has ended, as a cluster stops all machines at the same time and the engine still answers its requests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from slipstream.core.config_table import MOST_PORT
from slipstream.core.errors import ConfigError
from slipstream.core.numerals import is_whole
from slipstream.engine.rank_link import read_secret

DEFAULT_PORT = 29500
MAX_RANKS = 8
MAX_DRAIN_S = 86400
MAX_NUMBER = 1 << 31  # of a variable
_START = "import sys; sys.path[:] = {path!r}; from slipstream.engine.node_rank import main; main()"
_PAUSE_S = 1.0
_LOOK_S = 0.2
_STOPPED_S = 1.0  # after which a rank that is stopped counts as lost, as in engine/rank_processes.py


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", help="HOST:PORT at which the engine listens, its rank_address")
    parser.add_argument("--secret-file", required=True, help="a file with the secret of rank_secret_file")
    parser.add_argument("--nodes", type=int, help="machines that share the model, num_nodes")
    parser.add_argument("--node", type=int, help="which one this is, from 1 on; the engine's is 0")
    parser.add_argument("--ranks", type=int, help="ranks of this machine (default: its GPUs)")
    parser.add_argument("--model", default="", help="the checkpoint here, if it has another path than at the engine's")
    drain = "seconds after SIGTERM in which the ranks go on until the engine ends (default: 0, they end at once)"
    parser.add_argument("--drain-timeout", type=int, default=0, help=drain)


class _Stops:
    """How often SIGTERM has come. Counted, and not raised: an exception is lost in a destructor, as that of a rank's
    process that has ended, and the worker would never end."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def run(arguments: argparse.Namespace) -> int:
    ranks = ranks_here(arguments, os.environ)
    if not 0 <= arguments.drain_timeout <= MAX_DRAIN_S:
        raise ConfigError("--drain-timeout", arguments.drain_timeout, f"accepted: 0 to {MAX_DRAIN_S} seconds")
    read_secret(arguments.secret_file)
    processes, stops = [_RankProcess(rank) for rank in ranks], _Stops()
    try:
        signal.signal(signal.SIGTERM, stops.note)
        while not stops.count:
            for process in processes:
                process.look(time.monotonic())
            time.sleep(_LOOK_S)
        limit = time.monotonic() + arguments.drain_timeout
        while stops.count < 2 and time.monotonic() < limit and any(process.runs for process in processes):
            time.sleep(_LOOK_S)
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the next one must not keep a rank alive
        for process in processes:
            process.kill()


class _RankProcess:
    """The process of a rank, which is started again when it has ended, and ended when a signal has stopped it."""

    def __init__(self, rank: dict[str, object]) -> None:
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._begun_at = self._seen_at = 0.0  # seen_at: last running

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def look(self, now: float) -> None:
        if not self.runs and now > self._begun_at + _PAUSE_S:
            self._process, self._begun_at = _start(self._rank), now
        if self._process is None or not _is_stopped(self._process):
            self._seen_at = now
        elif now > self._seen_at + _STOPPED_S:  # it does not see that the engine has given it up
            print(f"rank {self._rank['rank']} is stopped, and is started again", file=sys.stderr)
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """By a signal, such as SIGSTOP. What is seen stays to be seen by others."""
    with suppress(ChildProcessError):  # it has ended, and that was seen
        state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return state is not None and state.si_code == os.CLD_STOPPED
    return False


def ranks_here(arguments: argparse.Namespace, variables: Mapping[str, str]) -> list[dict[str, object]]:
    """The fields of node_rank.NodeRank of each rank of this machine. Raises ConfigError."""
    is_one_of_many = arguments.node is None and "RANK" in variables
    host, port = _address(arguments.address, variables)
    if is_one_of_many:
        first, size = _number("RANK", variables), _number("WORLD_SIZE", variables)
        if not 0 < first < size <= MAX_RANKS:
            accepted = f"accepted: up to {MAX_RANKS} ranks, of which the engine's machine has the first"
            raise ConfigError("RANK", f"{first} of {size}", accepted)
        places = [_number("LOCAL_RANK", variables) if "LOCAL_RANK" in variables else 0]
    else:
        first, size, places = _ranks_of_node(arguments, variables)
    common = {"parent": os.getpid(), "host": host, "port": port, "world_size": size, "model": arguments.model}
    common["secret_file"] = arguments.secret_file
    return [{**common, "rank": first + (0 if is_one_of_many else place), "local_rank": place} for place in places]


def _ranks_of_node(arguments: argparse.Namespace, variables: Mapping[str, str]) -> tuple[int, int, list[int]]:
    """The first rank of this machine, the number of all ranks, and the places of this machine's."""
    count = _num_gpus() if arguments.ranks is None else arguments.ranks
    if not 1 <= count <= MAX_RANKS // 2:
        accepted = f"accepted: 1 to {MAX_RANKS // 2}, as each machine has as many, and all up to {MAX_RANKS}"
        raise ConfigError("--ranks", count, accepted)
    nodes = _number("LWS_GROUP_SIZE", variables, "--nodes") if arguments.nodes is None else arguments.nodes
    if not 2 <= nodes <= MAX_RANKS // count:
        accepted = f"accepted with --ranks {count}: 2 to {MAX_RANKS // count}, up to {MAX_RANKS} ranks in all"
        raise ConfigError("--nodes", nodes, accepted)
    node = _number("LWS_WORKER_INDEX", variables, "--node") if arguments.node is None else arguments.node
    if not 1 <= node < nodes:
        raise ConfigError("--node", node, f"accepted: 1 to {nodes - 1}; 0 is the engine's machine")
    return node * count, nodes * count, list(range(count))


def _address(given: str | None, variables: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = (given or "").rpartition(":")
    if given is None:
        host = variables.get("MASTER_ADDR") or variables.get("LWS_LEADER_ADDRESS") or ""
        port = variables.get("MASTER_PORT") or str(DEFAULT_PORT)
    if not host or not is_whole(port, 1, MOST_PORT):
        accepted = "accepted: HOST:PORT; or the variables MASTER_ADDR and MASTER_PORT, or LWS_LEADER_ADDRESS"
        raise ConfigError("--address", (host and f"{host}:{port}") if given is None else given, accepted)
    return host.strip("[]"), int(port)


def _number(name: str, variables: Mapping[str, str], option: str = "") -> int:
    """The number in a variable, in place of an option."""
    value = variables.get(name, "")
    if not is_whole(value, 0, MAX_NUMBER):
        raise ConfigError(option or name, value, f"accepted: a number{f', here or as {name}' if option else ''}")
    return int(value)


def _num_gpus() -> int:
    """GPUs of this machine or container; 1 where there are none, for one rank."""
    return len([entry for entry in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", entry.name)]) or 1


def _start(rank: dict[str, object]) -> subprocess.Popen[bytes]:
    path = [place for place in sys.path if place]  # without the current directory, for safety
    command = [sys.executable, "-c", _START.format(path=path), json.dumps(rank)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)
