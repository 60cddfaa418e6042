"""Static buffers and a CUDA graph for each of a few padded shapes, which removes the host time of launches.

Belongs to the thread of its runtime. Knows neither PyTorch's modules nor TensorRT: `Prepare` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.encoders.checkpoint import Checkpoint

# texts are padded to one of these lengths or the largest one, rows to powers of two
TOKEN_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Prepared:
    """replay computes `output` [rows, width] from the prepared inputs; `kept` must stay alive as long."""

    output: torch.Tensor
    replay: Callable[[], None]
    kept: object = None


Prepare = Callable[[dict[str, torch.Tensor]], Prepared]


@dataclass(frozen=True)
class StaticShape:
    """staging (on the host, pinned for a GPU) and inputs (on the device): [num_inputs, size and what aligns it]."""

    size: tuple[int, int]
    staging: torch.Tensor
    inputs: torch.Tensor
    prepared: Prepared


class StaticShapes:
    def __init__(
        self, checkpoint: Checkpoint, largest: tuple[int, int], device: torch.device, prepare: Prepare
    ) -> None:
        """largest: (rows, tokens) of one run; prepare: called once per shape, at its first run."""
        self._names, self._device, self._prepare = checkpoint.input_names, device, prepare
        self._fillings = {"input_ids": checkpoint.pad_id}
        self.max_rows, self.max_tokens = largest
        self._shapes: dict[tuple[int, int], StaticShape] = {}

    def padded(self, rows: int, tokens: int) -> tuple[int, int]:
        wider = next((size for size in TOKEN_SIZES if size >= tokens), self.max_tokens)
        return min(1 << (rows - 1).bit_length(), self.max_rows), min(wider, self.max_tokens)

    def run(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """batch: int64 [rows, tokens] by name, no more than the largest; returns float32 [rows, width]."""
        rows, tokens = batch[self._names[0]].shape
        shape = self._shape(self.padded(rows, tokens))
        for name, flat in zip(self._names, shape.staging.numpy()):
            padded = flat[: shape.size[0] * shape.size[1]].reshape(shape.size)
            padded.fill(self._fillings.get(name, 0))
            padded[:rows, :tokens] = batch[name]
            if name == "attention_mask":
                padded[rows:, 0] = 1  # an empty row would divide by zero in mean pooling; its result is thrown away
        shape.inputs.copy_(shape.staging, non_blocking=True)
        shape.prepared.replay()
        # a copy: the buffer is the next run's. It also waits, so that the staging memory may be written again
        return shape.prepared.output[:rows].cpu().numpy().copy()

    def _shape(self, size: tuple[int, int]) -> StaticShape:
        if size not in self._shapes:
            buffer = torch.ones((len(self._names), _aligned(size[0] * size[1])), dtype=torch.int64)
            staging = buffer.pin_memory() if self._device.type == "cuda" else buffer
            inputs = torch.ones_like(buffer, device=self._device)
            by_name = {name: flat[: size[0] * size[1]].view(size) for name, flat in zip(self._names, inputs)}
            self._shapes[size] = StaticShape(size, staging, inputs, self._prepare(by_name))
        return self._shapes[size]


def _aligned(num_values: int) -> int:
    """Round up so that each input begins at a multiple of 256 bytes, as TensorRT requires."""
    return -(-num_values // 32) * 32


def captured(compute: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """`compute` as a CUDA graph.  Runs it once before, because the first run allocates memory and loads kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # its inputs may still be in flight
    with torch.cuda.stream(stream):
        compute()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        compute()
    return graph.replay
