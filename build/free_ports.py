"""Free ports for servers of the demo and of tests."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Unused ports; raises OSError for a host that this machine does not have.

    Below Linux's ephemeral range, as outgoing connections (tests open hundreds) would take a port before a server
    binds it. Drawn from the system's randomness, because seeded draws would collide between test processes.
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
