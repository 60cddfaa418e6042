"""Ports for a server that is started beside others: the demo's, and those of the tests."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports nobody listens on now; raises OSError for a host that this machine does not have.

    They lie below those that Linux gives to outgoing connections: one of these, of which tests open hundreds, would
    take a port before its server does. Drawn from the system: tests' own draws are the same in every run.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            found.add(port)
    return list(found)
