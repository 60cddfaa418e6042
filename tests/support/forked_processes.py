"""Ranks and grammar processes, forked from one that has imported what they do: torch alone takes each that starts two
seconds of CPU time.

What such a process runs, and whose child it is, are as in one that is started: the one that forks is asked by pytest's
process, which adopts the new one. Engines in processes of their own start theirs as they do without tests.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from slipstream.engine.child_process import start_process

_PR_SET_CHILD_SUBREAPER = 36
_START = "import sys; sys.path[:] = {path!r}; from forked_processes import serve; serve({fd})"
_MOST_COMMAND_BYTES = 8192  # of a command line, which is written over that of the process that forks
_FIRST_OWN_FD = 512  # above the numbers that the new process's sockets have to get
_libc = ctypes.CDLL(None)


class Forked:
    """What rank_processes and grammar_link ask of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self._has_ended = pid, False

    def wait(self, timeout: float = float("inf")) -> None:
        limit = time.monotonic() + timeout
        while not self._has_ended:
            if self.poll() is None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.0 if self._has_ended else 0.005)

    def poll(self) -> int | None:
        """Not None if it has ended."""
        if not self._has_ended:
            self._has_ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return 0 if self._has_ended else None

    def kill(self) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    """The process that forks, which begins with the first request and ends with `close`. Any thread."""

    def __init__(self) -> None:
        self._lock, self._socket, self._process = threading.Lock(), None, None

    def start(self, command: list[str], fds: tuple[int, ...], environment: Mapping[str, str] | None = None) -> Forked:
        """Takes the place of child_process.start_process."""
        variables = dict(os.environ if environment is None else environment)
        request = {"command": command, "fds": fds, "parent": os.getpid(), "environment": variables}
        with self._lock:
            if self._socket is None:
                self._begin()
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(self._socket, [json.dumps(request).encode()], [1, 2, *fds])
            pid = self._socket.recv(32)
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert pid, "the process that forks has ended"
        return Forked(int(pid))

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _START.format(path=[place for place in sys.path if place], fd=theirs.fileno())
        command = [sys.executable, "-c", code, "x" * _MOST_COMMAND_BYTES]
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # as grammar_link.py wants; later it would have no effect
        self._process = start_process(command, (theirs.fileno(),), environment)
        theirs.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._process.wait()


def serve(fd: int) -> NoReturn:
    """Fork a process for each request, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=fd)
    while True:
        request, fds, _, _ = socket.recv_fds(requests, 1 << 20, 16)
        if not request:
            os._exit(0)
        _import_for(json.loads(request)["command"][2])
        child = os.fork()
        if child == 0:
            if os.fork():
                os._exit(0)  # its child is then adopted
            _become(json.loads(request), fds, requests)
        for one in fds:
            os.close(one)
        os.waitpid(child, 0)


def _import_for(code: str) -> None:
    """What the process will import that runs this code."""
    module = "grammar_process" if "grammar_process" in code else "rank_process"
    if (name := f"slipstream.engine.{module}") not in sys.modules:
        importlib.import_module(name)
        gc.freeze()


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
    os._exit(1)  # what was run ends itself


def _write_command_line(command: list[str]) -> None:
    """By which tests find processes: where the kernel reads that of this process."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"\0".join(map(os.fsencode, command))
    assert len(line) < end - start
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
