"""open_runtime: the runtime that a model asks for. One that is missing is an error; no other is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import Checkpoint
from slipstream.encoders.runtime import RUNTIMES, Runtime, RuntimeSettings

FILES = {"onnxruntime": "model.onnx", "tensorrt": "model.plan"}


def _installed() -> list[str]:
    return [name for name in RUNTIMES if importlib.util.find_spec(name) is not None]


def open_runtime(settings: RuntimeSettings, checkpoint: Checkpoint) -> Runtime:
    """Raises ConfigError when the runtime, its file or the device is not there."""
    if settings.name not in RUNTIMES:
        raise ConfigError("runtime", settings.name, f"accepted: {', '.join(RUNTIMES)}")
    if settings.name != "torch":
        _refuse_torchs(settings)
    if importlib.util.find_spec(settings.name) is None:
        raise ConfigError(
            "runtime", settings.name, f"not installed; installed here: {', '.join(_installed()) or 'none'}"
        )
    if settings.name == "torch":
        from slipstream.encoders.torch_runtime import TorchRuntime

        return TorchRuntime(checkpoint, settings)
    path = _engine_file(settings)
    if settings.name == "onnxruntime":
        from slipstream.encoders.onnx_runtime import OnnxRuntime

        return OnnxRuntime(path, checkpoint, settings)
    from slipstream.encoders.tensorrt_runtime import TensorRtRuntime

    return TensorRtRuntime(path, checkpoint)


def _refuse_torchs(settings: RuntimeSettings) -> None:
    """Refuse parameters of `torch` for exported models, whose type is fixed."""
    for name, value in (("dtype", settings.dtype), ("cuda_graphs", settings.cuda_graphs)):
        if value != "auto":
            raise ConfigError(name, value, f"accepted with runtime={settings.name}: auto")


def _engine_file(settings: RuntimeSettings) -> Path:
    name = FILES[settings.name]
    how = f"runtime={settings.name} needs a folder with {name}, or such a file: build/build_encoder.py makes it"
    if settings.engine is None:
        raise ConfigError("engine", "", how)
    path = settings.engine if settings.engine.suffix == Path(name).suffix else settings.engine / name
    if not path.is_file():
        raise ConfigError("engine", str(settings.engine), how)
    return path
