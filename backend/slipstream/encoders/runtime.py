"""What a runtime of an encoder is, and what it is opened with. open_runtime.py chooses among the three."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

RUNTIMES = ("torch", "onnxruntime", "tensorrt")


class Runtime(Protocol):
    """Runs batches: int64 [num_texts, num_tokens] by input name -> float32 [num_texts, width].

    max_rows: texts per run beyond which a second run is faster.
    """

    max_rows: int

    def run(self, batch: Mapping[str, np.ndarray]) -> np.ndarray: ...


@dataclass(frozen=True)
class RuntimeSettings:
    """engine: folder with model.onnx or model.plan, or such a file; num_threads 0: the runtime's default.

    dtype, cuda_graphs: of `torch`; `auto` is float16 and graphs on a GPU, float32 on a CPU.
    """

    name: str
    device: str = "auto"
    num_threads: int = 0
    engine: Path | None = None
    dtype: str = "auto"
    cuda_graphs: str = "auto"
