"""Processes of ranks, forked from one that has imported torch, which takes two seconds of CPU time in each that starts.

What a rank runs, and whose child it is, are as in a process that is started: the one that forks is asked by pytest's
process, which adopts the new one. Engines in processes of their own start their ranks as they do without tests.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_START = "import sys; sys.path[:] = {path!r}; from forked_ranks import serve; serve({fd})"
_MOST_COMMAND_BYTES = 8192  # of the command line of a rank, which is written over that of the process that forks
_FIRST_OWN_FD = 512  # above the numbers that a rank's sockets have to get
_libc = ctypes.CDLL(None)


class ForkedRank:
    """What rank_processes asks of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self._has_ended = pid, False

    def wait(self, timeout: float = float("inf")) -> None:
        limit = time.monotonic() + timeout
        while not self._has_ended:
            self._has_ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            if not self._has_ended and time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.0 if self._has_ended else 0.005)

    def kill(self) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)


class RankForks:
    """The process that forks, which begins with the first rank and ends with `close`. Any thread."""

    def __init__(self) -> None:
        self._lock, self._socket, self._process = threading.Lock(), None, None

    def start(self, command: list[str], fds: tuple[int, ...]) -> ForkedRank:
        """Takes the place of rank_processes.start_process."""
        request = {"command": command, "fds": fds, "parent": os.getpid(), "environment": dict(os.environ)}
        with self._lock:
            if self._socket is None:
                self._begin()
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(self._socket, [json.dumps(request).encode()], [1, 2, *fds])
            pid = self._socket.recv(32)
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert pid, "the process that forks ranks has ended"
        return ForkedRank(int(pid))

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _START.format(path=[place for place in sys.path if place], fd=theirs.fileno())
        command = [sys.executable, "-c", code, "x" * _MOST_COMMAND_BYTES]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._process.wait()


def serve(fd: int) -> NoReturn:
    """Fork a rank for each request, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module("slipstream.engine.rank_process")  # imports torch
    gc.freeze()
    requests = socket.socket(fileno=fd)
    while True:
        request, fds, _, _ = socket.recv_fds(requests, 1 << 20, 16)
        if not request:
            os._exit(0)
        child = os.fork()
        if child == 0:
            if os.fork():
                os._exit(0)  # its child is then adopted
            _become(json.loads(request), fds, requests)
        for one in fds:
            os.close(one)
        os.waitpid(child, 0)


def _become(request: dict[str, Any], fds: list[int], requests: socket.socket) -> NoReturn:
    """The process that subprocess.Popen(command) would have made."""
    try:
        while os.getppid() != request["parent"]:
            time.sleep(0.001)
        requests.send(str(os.getpid()).encode())
        requests.close()
        own = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_OWN_FD) for fd in fds]
        os.closerange(3, _FIRST_OWN_FD)
        for fd, number in zip(own, [1, 2, *request["fds"]]):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.orig_argv, sys.argv = request["command"], ["-c", *request["command"][3:]]
        _write_command_line(request["command"])
        exec(request["command"][2], {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # a rank ends itself


def _write_command_line(command: list[str]) -> None:
    """By which tests find ranks: where the kernel reads that of this process."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"\0".join(map(os.fsencode, command))
    assert len(line) < end - start
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
