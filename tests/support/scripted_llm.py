"""A stand-in for `llm` in Triton's Python backend: streams the pieces that a test's sampling_parameters list.

`write_scripted_llm` puts it into a model repository; the rest of this file is that model's model.py.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
input { name: "stop" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
input { name: "return_finish_reason" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
input { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
input { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
output { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


def write_scripted_llm(repository: Path, name: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"{_CONFIG}')
    shutil.copy(__file__, repository / name / "1/model.py")


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> None:
        import numpy as np
        import triton_python_backend_utils as pb_utils

        for request in requests:
            sender = request.get_response_sender()
            script = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
            told = {} if script is None else json.loads(script.as_numpy().reshape(-1)[0])
            pieces = told.get("pieces", [])
            time.sleep(told.get("silent_s", 0))
            for number, piece in enumerate(pieces, 1):
                texts = {"text_output": piece, "finish_reason": "stop" if number == len(pieces) else ""}
                outputs = [
                    pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_)) for name, text in texts.items()
                ]
                counts = {"num_input_tokens": 7, "num_output_tokens": 2}  # of every piece
                outputs += [pb_utils.Tensor(name, np.array([count], np.uint32)) for name, count in counts.items()]
                sender.send(pb_utils.InferenceResponse(outputs))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
