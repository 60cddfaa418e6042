"""TensorRT as the runtime of an encoder that build/build_encoder.py built: padded shapes, a CUDA graph for each.

Written against the documented Python API of TensorRT 10 and tested with a stand-in: it was never run with the real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorrt as trt
import torch

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import Checkpoint
from slipstream.encoders.static_shapes import Prepared, StaticShapes, captured


class TensorRtRuntime:
    def __init__(self, path: Path, checkpoint: Checkpoint, device: str = "cuda") -> None:
        """Raises ConfigError for no GPU, an engine of another TensorRT, or one of another checkpoint."""
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("runtime", "tensorrt", "PyTorch sees no GPU here")
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            told = f"TensorRT {trt.__version__} cannot read it; build it with this version, on this kind of GPU"
            raise ConfigError("engine", str(path), told)
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        if set(inputs) != set(checkpoint.input_names):
            accepted = f"accepted: inputs {', '.join(checkpoint.input_names)}, as of `model`"
            raise ConfigError("engine", ", ".join(inputs), accepted)
        self._output_name = next(name for name in names if name not in inputs)
        _, _, (self.max_rows, self._max_tokens) = self._engine.get_tensor_profile_shape(inputs[0], 0)
        largest = (self.max_rows, self._max_tokens)
        self._shapes = StaticShapes(checkpoint, largest, torch.device(device), self._prepare)

    def run(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """Batches beyond the engine's largest are run in parts; a text beyond its tokens is a ConfigError."""
        rows, tokens = batch["input_ids"].shape
        if tokens > self._max_tokens:
            raise ConfigError("engine", tokens, f"has texts of at most {self._max_tokens} tokens; build it with more")
        parts = [
            self._shapes.run({name: array[start : start + self.max_rows] for name, array in batch.items()})
            for start in range(0, rows, self.max_rows)
        ]
        return np.concatenate(parts)

    def _prepare(self, inputs: dict[str, torch.Tensor]) -> Prepared:
        """An execution context of its own: a graph is bound to the addresses that its context has."""
        context = self._engine.create_execution_context()
        for name, buffer in inputs.items():
            context.set_input_shape(name, tuple(buffer.shape))
            context.set_tensor_address(name, buffer.data_ptr())
        shape = tuple(context.get_tensor_shape(self._output_name))
        output = torch.empty(shape, device=inputs["input_ids"].device)
        context.set_tensor_address(self._output_name, output.data_ptr())
        replay = captured(lambda: context.execute_async_v3(torch.cuda.current_stream().cuda_stream))
        return Prepared(output, replay, kept=context)
