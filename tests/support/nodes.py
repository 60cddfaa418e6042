"""A second node on this machine: `slipstream worker`, which reaches the engine through a proxy."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import psutil
from patience import wait_until
from processes import children_of


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class Proxy:
    """Passes bytes between a worker and an engine that comes and goes. `pause`: what arrives is kept, as if packets
    were dropped. `cut`: ends all connections."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def pause(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        for one in self._pairs:
            end(one)
        self._pairs = []

    def close(self) -> None:
        self.resume()
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target), 5)
                far.settimeout(None)
            except OSError:  # no engine yet
                near.close()
                continue
            self._pairs += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._flows.wait()
                sink.sendall(data)
        except OSError:
            pass  # the other direction has ended both
        for one in (source, sink):
            end(one)


def end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Node:
    """One rank of two: `slipstream worker` by torchrun's variables. address: where the engine shall listen.
    options: further ones of the command."""

    def __init__(self, folder: Path, secret: bytes, *options: str) -> None:
        self._options = options
        self.secret = folder / "secret"
        self.secret.write_bytes(secret)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.proxy = Proxy(port)
        self.start()

    def start(self) -> None:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.proxy.port), "RANK": "1", "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "slipstream.cli", "worker", "--secret-file", str(self.secret)]
        command += self._options
        self.worker = subprocess.Popen(command, env={**os.environ, **variables, "OMP_NUM_THREADS": "1"})

    def freeze(self) -> None:
        """Stop the worker and its rank, as if the whole machine stood still."""
        rank = self.rank()
        self.worker.send_signal(signal.SIGSTOP)
        rank.suspend()

    def thaw(self) -> None:
        """The worker goes on, and finds its rank stopped."""
        self.worker.send_signal(signal.SIGCONT)

    def rank(self) -> psutil.Process:
        """The rank's process, as soon as there is one."""
        wait_until(lambda: bool(self._ranks()), "the worker to start its rank")
        return self._ranks()[0]

    def _ranks(self) -> list[psutil.Process]:
        return children_of(self.worker.pid, "node_rank")

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.worker.terminate()
        self.worker.wait()
        self.proxy.close()
