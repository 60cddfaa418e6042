"""A fake of `safety` and `quality` in Triton's Python backend that passes every text, or hangs.

It hangs while the file `hang` is in its folder. `write_hanging_encoder` puts it into a model repository; the rest of
this file is that model's model.py.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

_CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "text" data_type: TYPE_STRING dims: [ -1, 1 ] optional: true }
input { name: "prompt" data_type: TYPE_STRING dims: [ -1, 1 ] optional: true }
input { name: "answer" data_type: TYPE_STRING dims: [ -1, 1 ] optional: true }
output { name: "flagged" data_type: TYPE_BOOL dims: [ -1, 1 ] }
output { name: "categories" data_type: TYPE_STRING dims: [ -1, 1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ -1, 1 ] }
output { name: "score" data_type: TYPE_FP32 dims: [ -1, 1 ] }
output { name: "checks" data_type: TYPE_STRING dims: [ -1, 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


def write_hanging_encoder(repository: Path, name: str) -> Path:
    """Returns the file whose existence makes it hang."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"{_CONFIG}')
    shutil.copy(__file__, repository / name / "1/model.py")
    return repository / name / "hang"


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._sign = Path(args["model_repository"]) / "hang"

    def execute(self, requests: list[Any]) -> list[Any]:
        import numpy as np
        import triton_python_backend_utils as pb_utils

        while self._sign.exists():
            time.sleep(0.02)
        values = {
            "flagged": np.array([[False]]),
            "categories": np.array([[b""]], dtype=np.object_),
            "scores": np.array([[0.1]], np.float32),
            "score": np.array([[0.5]], np.float32),
            "checks": np.array([[b"{}"]], dtype=np.object_),
        }
        outputs = [pb_utils.Tensor(name, value) for name, value in values.items()]
        return [pb_utils.InferenceResponse(outputs) for _ in requests]
