"""A gateway as `slipstream serve-openai` starts it, as a subprocess, for tests and benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from patience import PATIENCE_S
from triton_server import HOST, free_ports


@contextmanager
def interruptible() -> Iterator[None]:
    """What is started here gets SIGINT, also from a background job of a shell, which ignores it: this is inherited, and
    uvicorn, which raises SIGINT again behind its shutdown, then ends with status 0."""
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class GatewayProcess:
    """Start on entering, ready when `with` gives it, gone after leaving."""

    def __init__(self, grpc_url: str, arguments: Sequence[str] = (), start_timeout_s: float = 2 * PATIENCE_S) -> None:
        [self.port] = free_ports(1)
        self.url = f"http://{HOST}:{self.port}"
        self._arguments = ["--triton", grpc_url, "--host", HOST, "--port", str(self.port), *arguments]
        self._start_timeout_s = start_timeout_s
        handle, name = tempfile.mkstemp(prefix="gateway-", suffix=".log")
        os.close(handle)
        self.log_path = Path(name)

    def __enter__(self) -> GatewayProcess:
        command = [sys.executable, "-m", "slipstream.cli", "serve-openai", *self._arguments]
        with self.log_path.open("wb") as log, interruptible():
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + self._start_timeout_s
        while self.get("/health")[0] != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the gateway did not start:\n{self.log[-4000:]}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            print(f"---- gateway log (end) ----\n{self.log[-4000:]}")
        self.log_path.unlink(missing_ok=True)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def get(self, path: str) -> tuple[int, str]:
        """(status, body); status 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0, ""

    def metrics(self) -> dict[str, float]:
        lines = [line for line in self.get("/metrics")[1].splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
