"""The server shared by tests of the whole system: the project's model repository with the demo model.

Started once per test session (a start costs seconds). Variants of `llm`, for tests that need other settings, are
written into the same repository and loaded while their test runs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from patience import PATIENCE_S
from processes import children_of
from triton_server import TritonServer, find_tritonserver

ROOT = Path(__file__).resolve().parents[2]
POOL_BYTES = 1 << 28  # of each engine; the default is 1 GiB, and several servers with several models share a machine
MODELS = ("llm", "preprocessing", "postprocessing", "ensemble")


def backends_dir() -> Path | None:
    """The assembled backends, or None before `make assemble`."""
    folder = ROOT / "install/backends"
    return folder if (folder / "slipstream/libtriton_slipstream.so").exists() else None


def missing_server() -> str:
    """Why no test can run the real server here; "" when they can."""
    if find_tritonserver() is None:
        return "no tritonserver: nvidia-pytriton is not installed"
    return "" if backends_dir() is not None else "no install tree: run `make assemble`"


def parameter(key: str, value: object) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


class LlmServer(TritonServer):
    """tritonserver on a copy of model_repository whose checkpoint paths are absolute."""

    def __init__(
        self, folder: Path, checkpoint: Path, *, load_models: Sequence[str] = MODELS, **options: object
    ) -> None:
        backends = backends_dir()
        assert backends is not None, "run `make assemble` first"
        self.repository = folder / "model_repository"
        self.checkpoint = checkpoint
        shutil.copytree(ROOT / "model_repository", self.repository)
        for path in self.repository.glob("*/config.pbtxt"):
            path.write_text(path.read_text().replace("../../models/slipstream-demo-code", str(checkpoint)))
        shutil.copy(Path(__file__).with_name("own_processors.py"), self.repository / "llm")
        processors = "slipstream.processors:NoRepeatNgram, force=own_processors:Force"
        # refused by default, and tested
        served = {"stop_by_request_id": "true", "max_logits_bytes": 4 << 20, "logits_processors": processors}
        with (self.repository / "llm/config.pbtxt").open("a") as config:
            config.write("".join(parameter(*one) for one in {**served, "memory_bytes": POOL_BYTES}.items()))
        # the Python backend's stub takes the environment of the first python3 in PATH: this one, which has the project
        path = {"PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', '')}"}
        super().__init__(
            self.repository,
            backends,
            control_mode="explicit",
            load_models=load_models,
            env=path,
            **options,
        )

    def add_variant(
        self, name: str, parameters: Mapping[str, object], model: Path | str | None = None, extra: str = ""
    ) -> None:
        """Write another `llm` into the repository; it is not loaded. extra: the end of its config.pbtxt."""
        folder = self.repository / name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        text = f'name: "{name}"\nbackend: "slipstream"\n' + parameter("model", model or self.checkpoint)
        if model is None and not any("blocks" in key or "memory" in key or key == "task" for key in parameters):
            text += parameter("memory_bytes", POOL_BYTES)
        text += "".join(parameter(key, value) for key, value in parameters.items())
        (folder.parent / "config.pbtxt").write_text(text + extra)

    @contextmanager
    def variant(
        self, name: str, parameters: Mapping[str, object], model: Path | str | None = None, extra: str = ""
    ) -> Iterator[str]:
        """A loaded variant of `llm` for the length of the block."""
        self.add_variant(name, parameters, model, extra)
        status, body = self.load(name)
        assert status == 200, body.decode()
        try:
            yield name
        finally:
            self.unload(name)
            self.wait_until(lambda: not self.is_model_ready(name), f"{name} to be unloaded")

    def engines(self) -> list[psutil.Process]:
        """Engine processes of this server that run (a process that is just ending is not among them)."""
        return children_of(self.pid, "slipstream.engine.main", recursive=True)

    def metric(self, family: str, model: str = "llm", **labels: str) -> float:
        """Sum of the samples of a family for a model; 0 when there is none."""
        wanted = [f'{key}="{value}"' for key, value in {"model": model, **labels}.items()]
        samples = self.metrics().items()
        return sum(v for name, v in samples if name.partition("{")[0] == family and all(w in name for w in wanted))

    def settled(self, family: str, model: str = "llm", **labels: str) -> float:
        """A counter that has stopped changing: an engine publishes its metrics up to 0.25 s late."""
        self.wait_idle(model)
        seen, value = -1.0, self.metric(family, model, **labels)
        while value != seen:
            time.sleep(0.6)
            seen, value = value, self.metric(family, model, **labels)
        return value

    def wait_counted(self, value: float, family: str, model: str = "llm", **labels: str) -> None:
        """Until a counter has that value and the engine is idle."""
        self.wait_idle(model)
        what = f"{family} {labels} of {model} to be {value}; it was {self.metric(family, model, **labels)}"
        self.wait_until(lambda: self.metric(family, model, **labels) == value, what)

    def wait_idle(self, model: str = "llm", timeout_s: float = PATIENCE_S) -> None:
        """Wait until nothing runs, every KV block is free and the metrics are stable (they lag by 0.25 s).

        Fails with the figures if something remains.
        """
        families = ("slipstream_requests_running", "slipstream_requests_waiting", "slipstream_kv_blocks_used")
        deadline, seen = time.monotonic() + timeout_s, -1.0
        while True:
            busy = {family: value for family in families if (value := self.metric(family, model))}
            made = self.metric("slipstream_generation_tokens_total", model)
            if not busy and made == seen:
                break
            assert time.monotonic() < deadline, f"{model} does not become idle: {busy}"
            seen = made
            time.sleep(0.15)
        assert self.metric("slipstream_kv_blocks_leaked", model) == 0
