"""One gRPC bidirectional stream to the server, its answers collected as they come."""

from __future__ import annotations

import json
import queue
import time
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from patience import PATIENCE_S


class GrpcStream:
    """`with GrpcStream(url) as stream: stream.send(...)`; answers are strings of text_output, errors their messages.

    answered: ids of the requests that have had an answer.
    """

    def __init__(self, url: str) -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.texts: list[str] = []
        self.errors: list[str] = []
        self.answered: set[str] = set()
        self.num_finals = 0

    def __enter__(self) -> GrpcStream:
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.stop_stream(cancel_requests=error is not None)
        self._client.close()

    def send(self, model: str, script: dict[str, object] | str, handle: int | None = None, **options: Any) -> None:
        """Ask for text_output; script is the stand-in engine's, or plain text. handle: the tensor REQUEST_HANDLE."""
        text = script if isinstance(script, str) else json.dumps(script)
        tensor = grpcclient.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
        tensors = [tensor]
        if handle is not None:
            tensors.append(grpcclient.InferInput("REQUEST_HANDLE", [1], "UINT64"))
            tensors[-1].set_data_from_numpy(np.array([handle], np.uint64))
        outputs = [grpcclient.InferRequestedOutput("text_output")]
        self._client.async_stream_infer(model, tensors, outputs=outputs, enable_empty_final_response=True, **options)

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def wait(self, num_texts: int = 10**9, num_ends: int = 10**9, timeout_s: float = PATIENCE_S) -> None:
        """Until that many texts, or that many final answers and errors.  Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while len(self.texts) < num_texts and self.num_finals + len(self.errors) < num_ends:
            try:
                result, error = self._answers.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"{len(self.texts)} texts, {self.num_finals} finals, {self.errors}") from None
            if error is not None:
                self.errors.append(error.message())
                continue
            response = result.get_response()
            self.answered.add(response.id)
            if response.outputs:
                self.texts.append(result.as_numpy("text_output")[0].decode())
            self.num_finals += response.parameters["triton_final_response"].bool_param
