"""A real tritonserver as a context manager, for every test that needs one.

Runs the server that nvidia-pytriton ships (2.51) on free loopback ports; the log goes to a file that `log` reads.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from patience import PATIENCE_S

sys.path.append(str(Path(__file__).resolve().parents[2] / "build"))
from free_ports import free_ports

HOST = "127.0.0.1"


def find_tritonserver() -> Path | None:
    """The server binary of the installed nvidia-pytriton, or None."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "tritonserver" / "bin" / "tritonserver"
    return binary if binary.exists() else None


class TritonServer:
    """Start on entering, ready when `with` gives it, gone after leaving.

    control_mode is "none" (all models load at start) or "explicit" (load_models are loaded at start).
    Raises RuntimeError with the end of the log when the server exits or is not ready in time.
    """

    def __init__(
        self,
        model_repository: Path | str,
        backend_dir: Path | str,
        *,
        control_mode: str = "none",
        load_models: Sequence[str] = (),
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 2 * PATIENCE_S,
    ) -> None:
        self.repository = Path(model_repository)
        self._backend_dir = Path(backend_dir)
        self._control = [f"--model-control-mode={control_mode}", *(f"--load-model={name}" for name in load_models)]
        self._extra_args = list(extra_args)
        self._env = dict(env or {})
        self._start_timeout_s = start_timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        http, grpc, metrics = free_ports(3)
        self._ports = (http, grpc, metrics)
        self.http_url = f"{HOST}:{http}"
        self.grpc_url = f"{HOST}:{grpc}"
        self.metrics_url = f"http://{HOST}:{metrics}/metrics"
        handle, name = tempfile.mkstemp(prefix="tritonserver-", suffix=".log")
        os.close(handle)
        self.log_path = Path(name)

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            print(f"---- tritonserver log (end) ----\n{self.log[-6000:]}")
        self.log_path.unlink(missing_ok=True)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was not started"
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self._environment()
            )
        try:
            self.wait_until(self._is_server_ready, "the server to be ready", self._start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 20.0) -> None:
        """SIGTERM, then SIGKILL after timeout_s."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _command(self) -> list[str]:
        binary = find_tritonserver()
        if binary is None:
            raise RuntimeError("no tritonserver: install nvidia-pytriton")
        http, grpc, metrics = self._ports
        return [
            str(binary),
            f"--model-repository={self.repository}",
            f"--backend-directory={self._backend_dir}",
            f"--http-address={HOST}",
            f"--http-port={http}",
            f"--grpc-address={HOST}",
            f"--grpc-port={grpc}",
            f"--metrics-address={HOST}",
            f"--metrics-port={metrics}",
            "--exit-timeout-secs=10",
            *self._control,
            *self._extra_args,
        ]

    def _environment(self) -> dict[str, str]:
        binary = find_tritonserver()
        assert binary is not None
        site_packages = binary.parents[3]
        libraries = [str(site_packages / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR") or ""]
        inherited = os.environ.get("LD_LIBRARY_PATH")
        path = ":".join(one for one in [*libraries, inherited] if one)
        return {**os.environ, "LD_LIBRARY_PATH": path, **self._env}

    def _is_server_ready(self) -> bool:
        return self.get("/v2/health/ready")[0] == 200

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Poll condition() until it is true.  Raises RuntimeError on time-out or when the server exits."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self.is_alive():
                raise RuntimeError(f"tritonserver exited while waiting for {what}:\n{self.log[-6000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {timeout_s} s for {what}:\n{self.log[-6000:]}")
            time.sleep(0.02)

    # ------------------------------------------------------------ plain HTTP

    def get(self, path: str) -> tuple[int, bytes]:
        """(status, body); status 0 when nobody answers."""
        return fetch(urllib.request.Request(f"http://{self.http_url}{path}"))

    def post(self, path: str, body: object) -> tuple[int, bytes]:
        data = json.dumps(body).encode()
        return fetch(urllib.request.Request(f"http://{self.http_url}{path}", data=data, method="POST"))

    def is_model_ready(self, name: str) -> bool:
        return self.get(f"/v2/models/{name}/ready")[0] == 200

    def wait_model_ready(self, name: str) -> None:
        self.wait_until(lambda: self.is_model_ready(name), f"model {name} to be ready")

    def load(self, name: str) -> tuple[int, bytes]:
        return self.post(f"/v2/repository/models/{name}/load", {})

    def unload(self, name: str) -> tuple[int, bytes]:
        return self.post(f"/v2/repository/models/{name}/unload", {})

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: 'family{label="value",...}' -> value."""
        for _ in range(3):  # a connection was refused once in some thousand, with the server alive before and after
            status, body = fetch(urllib.request.Request(self.metrics_url))
            if status:
                break
            time.sleep(0.1)
        assert status == 200, body
        lines = [line for line in body.decode().splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def fetch(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=10 * PATIENCE_S) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return 0, b""
