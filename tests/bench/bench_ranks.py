"""What a step costs that several processes share: serialising its message, and its way to another process.

A decode step of so many requests, as the engine sends it. No GPU, no model. The way ends when the other process has
the message as objects again.
"""

from __future__ import annotations

import argparse
import pickle
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from slipstream.worker.interface import StepInput, Updates

_PEER = """
import sys, time
from multiprocessing.connection import Connection
from slipstream.worker.interface import StepInput
connection = Connection(int(sys.argv[1]))
while True:
    try:
        connection.recv()
    except EOFError:
        break
    connection.send(time.monotonic_ns())
"""


def decode_step(num_requests: int) -> StepInput:
    """One of 64 requests gets a new block, as with blocks of 64 tokens."""
    ids = list(range(1000, 1000 + num_requests))
    computed = list(range(900, 900 + num_requests))
    ones, grown = [1] * num_requests, {ids[index]: [index] for index in range(0, num_requests, 64)}
    pending, samples = list(range(num_requests)), [True] * num_requests
    tokens = [0] * num_requests
    updates = Updates(block_ids=grown)
    return StepInput(1, ids, computed, ones, tokens, samples, tokens, pending=pending, updates=updates)


def microseconds(num_requests: int, repeats: int) -> tuple[int, float, float]:
    """Bytes of a message, and medians: of serialising it, and of all until the other process has it."""
    step, serialising, arriving = decode_step(num_requests), [], []
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", _PEER, str(theirs.fileno())], pass_fds=[theirs.fileno()]):
        theirs.close()
        connection = Connection(ours.detach())
        for _ in range(repeats):
            start = time.monotonic_ns()
            message = pickle.dumps(("execute", step), pickle.HIGHEST_PROTOCOL)
            serialising.append(time.monotonic_ns() - start)
            connection.send_bytes(message)
            arriving.append(connection.recv() - start)
            time.sleep(0.001)
        connection.close()
    return len(message), statistics.median(serialising) / 1e3, statistics.median(arriving) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="1,8,64,256")
    parser.add_argument("--repeats", type=int, default=500)
    arguments = parser.parse_args()
    for count in map(int, arguments.requests.split(",")):
        size, serialised, arrived = microseconds(count, arguments.repeats)
        print(f"{count} requests: {size} bytes, serialised in {serialised:.0f} us, arrived after {arrived:.0f} us")


if __name__ == "__main__":
    main()
