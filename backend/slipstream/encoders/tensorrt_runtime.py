"""TensorRT as the runtime of an encoder that build/build_encoder.py built: padded shapes, a CUDA graph for each.

Written against the documented Python API of TensorRT 10 and tested with a stand-in: it was never run with the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt as trt
import torch

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import Checkpoint

TOKEN_STEP = 32  # texts are padded to multiples of it, rows to powers of two: 6 x 16 graphs at most for 512 tokens


@dataclass(frozen=True)
class PaddedShape:
    """Static buffers of one shape and how to run it; a graph is bound to its own execution context."""

    inputs: dict[str, torch.Tensor]
    output: torch.Tensor
    replay: Callable[[], None]
    context: Any


class TensorRtRuntime:
    def __init__(self, path: Path, checkpoint: Checkpoint, device: str = "cuda") -> None:
        """Raises ConfigError for no GPU, an engine of another TensorRT, or one of another checkpoint."""
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("runtime", "tensorrt", "PyTorch sees no GPU here")
        self._device = torch.device(device)
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
        self._input_names = inputs
        self._output_name = next(name for name in names if name not in inputs)
        _, _, (self._max_rows, self._max_tokens) = self._engine.get_tensor_profile_shape(inputs[0], 0)
        self._shapes: dict[tuple[int, int], PaddedShape] = {}

    def run(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """Batches beyond the engine's largest are run in parts; a text beyond its tokens is a ConfigError."""
        rows, tokens = batch[self._input_names[0]].shape
        if tokens > self._max_tokens:
            raise ConfigError("engine", tokens, f"has texts of at most {self._max_tokens} tokens; build it with more")
        parts = [
            self._run_part({name: array[start : start + self._max_rows] for name, array in batch.items()})
            for start in range(0, rows, self._max_rows)
        ]
        return np.concatenate(parts)

    def _run_part(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        rows, tokens = batch[self._input_names[0]].shape
        shape = self._shape(rows, tokens)
        for name, buffer in shape.inputs.items():
            buffer.zero_()
            buffer[:rows, :tokens].copy_(torch.from_numpy(batch[name]))
        # an empty row would divide by zero in mean pooling; its result is thrown away
        shape.inputs["attention_mask"][rows:, 0] = 1
        shape.replay()
        return shape.output[:rows].cpu().numpy().copy()  # the buffer is the next run's

    def _shape(self, rows: int, tokens: int) -> PaddedShape:
        padded = (
            min(1 << (rows - 1).bit_length(), self._max_rows),
            min(-(-tokens // TOKEN_STEP) * TOKEN_STEP, self._max_tokens),
        )
        if padded not in self._shapes:
            self._shapes[padded] = self._new_shape(padded)
        return self._shapes[padded]

    def _new_shape(self, padded: tuple[int, int]) -> PaddedShape:
        context = self._engine.create_execution_context()
        inputs = {name: torch.ones(padded, dtype=torch.int64, device=self._device) for name in self._input_names}
        for name, buffer in inputs.items():
            context.set_input_shape(name, padded)
            context.set_tensor_address(name, buffer.data_ptr())
        output = torch.empty(tuple(context.get_tensor_shape(self._output_name)), device=self._device)
        context.set_tensor_address(self._output_name, output.data_ptr())
        return PaddedShape(inputs, output, capture(context), context)


def capture(context: Any) -> Callable[[], None]:
    """The context's run as a CUDA graph.  It runs once before: a shape's first run allocates, as no graph may."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        context.execute_async_v3(stream.cuda_stream)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        context.execute_async_v3(stream.cuda_stream)
    return graph.replay
