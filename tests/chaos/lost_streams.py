"""Sockets of the gRPC streams that server 2.51 loses: their clients are gone, the server never closes them.

A cancel that meets the end of its request can go unheard (docs/operations.md): the stream's state, and with it the
socket of its connection, stays for good. It happens without any backend too (tests/triton/test_lost_streams.py). They
are told from a leak of ours by what they are: TCP, connected once to the port of gRPC, closed for the kernel, still
open in the server.
"""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

SYS_PIDFD_GETFD = 438  # x86-64 and arm64
TCP_CLOSE = 7
INODE_COLUMNS = {"tcp": 9, "tcp6": 9, "unix": 6}  # of /proc/net
_libc = ctypes.CDLL(None, use_errno=True)


def refusal() -> str:
    """Why sockets of a process cannot be looked at here; "" when they can."""
    if not hasattr(os, "pidfd_open"):
        return "this Python has no pidfd_open"
    pidfd = os.pidfd_open(os.getpid())
    copy = _copy_of(pidfd, pidfd)
    os.close(pidfd)
    if copy < 0:
        return f"pidfd_getfd: {os.strerror(ctypes.get_errno())}"
    os.close(copy)
    return ""


def _copy_of(pidfd: int, descriptor: int) -> int:
    """A descriptor of a process's open file in this one; -1 when it is closed or the kernel refuses."""
    return int(_libc.syscall(SYS_PIDFD_GETFD, pidfd, descriptor, 0))


class LostStreams:
    """Counts them in one server, a child of this process. Where the kernel refuses a look, they count as a leak."""

    def __init__(self, pid: int, grpc_port: int) -> None:
        self._pid, self._port = pid, grpc_port
        self._pidfd = os.pidfd_open(pid)
        self._known: dict[tuple[int, str], bool] = {}  # (descriptor, inode) -> is lost

    def count(self) -> int:
        tables = self._connected()
        gone = {each for each in self._sockets() if each[1] not in tables}
        self._known = {each: self._known.get(each) or self._is_lost(each[0]) for each in gone}
        return sum(self._known.values())

    def _sockets(self) -> set[tuple[int, str]]:
        """(descriptor, inode) of each socket of the server."""
        sockets = set()
        for entry in Path(f"/proc/{self._pid}/fd").iterdir():
            try:
                target = entry.readlink().name
            except FileNotFoundError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                sockets.add((int(entry.name), target[len("socket:[") : -1]))
        return sockets

    def _connected(self) -> set[str]:
        """Inodes of the sockets that the kernel's tables have: a closed one is in none."""
        inodes = set()
        for name, column in INODE_COLUMNS.items():
            rows = Path(f"/proc/{self._pid}/net/{name}").read_text().splitlines()[1:]
            inodes |= {row.split()[column] for row in rows}
        return inodes

    def _is_lost(self, descriptor: int) -> bool:
        """Looks through a copy of the descriptor, which ends at once."""
        copy = _copy_of(self._pidfd, descriptor)
        if copy < 0:
            return False  # closed meanwhile, or not allowed: then it counts as a leak
        with socket.socket(fileno=copy) as seen:
            if seen.family not in (socket.AF_INET, socket.AF_INET6) or seen.type != socket.SOCK_STREAM:
                return False
            is_closed = seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
            return is_closed and seen.getsockname()[1] == self._port
