"""ONNX Runtime as the runtime of an encoder that build/build_encoder.py exported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import Checkpoint
from slipstream.encoders.runtime import RuntimeSettings

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxRuntime:
    def __init__(self, path: Path, checkpoint: Checkpoint, settings: RuntimeSettings) -> None:
        device = settings.device
        available = onnxruntime.get_available_providers()
        if device == "cuda" and _PROVIDERS["cuda"] not in available:
            raise ConfigError("device", device, f"this onnxruntime has no CUDA; it has {', '.join(available)}")
        is_gpu = device == "cuda" or (device == "auto" and _PROVIDERS["cuda"] in available)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = settings.num_threads
        self.max_rows = 256 if is_gpu else 32  # as in the torch runtime
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=[_PROVIDERS["cuda"], _PROVIDERS["cpu"]] if is_gpu else [_PROVIDERS["cpu"]]
            )
        except Exception as error:  # the library's own exception classes are private
            raise ConfigError("engine", str(path), f"onnxruntime cannot load it: {error}") from error
        self._names = {entry.name for entry in self._session.get_inputs()}
        if not {"input_ids", "attention_mask"} <= self._names <= set(checkpoint.input_names):
            accepted = f"accepted: inputs {', '.join(checkpoint.input_names)}, as of `model`"
            raise ConfigError("engine", ", ".join(sorted(self._names)), accepted)
        width = self._session.get_outputs()[0].shape[-1]
        if isinstance(width, int) and width != checkpoint.width:
            accepted = f"accepted: {checkpoint.width}, as of `model`, or of `labels`"
            raise ConfigError("engine", str(path), f"gives {width} numbers a text; {accepted}")

    def run(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        inputs = {name: values for name, values in batch.items() if name in self._names}
        return np.asarray(self._session.run(None, inputs)[0], dtype=np.float32)
