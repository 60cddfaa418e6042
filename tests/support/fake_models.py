"""A fake of Triton's gRPC for `guarded`, with models that are functions of a test.

The LLM's function returns the pieces of its answer; "safety" flags texts containing BAD, "injection" those with
IGNORE, "quality" returns 0.5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from patience import PATIENCE_S
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor

Llm = Callable[["FakeModels", Any], Iterator[str]]
ERROR = "error: "  # prefix of a piece that is an error


class FakeModels(service_pb2_grpc.GRPCInferenceServiceServicer):
    """requests: of the LLM. cancelled: set when one of its streams ends; may_go: for functions to wait on."""

    def __init__(self, llm: Llm, num_threads: int = 80) -> None:
        self._llm = llm
        self.requests: list[Any] = []
        self.checked: list[str] = []
        self.live: bool | grpc.StatusCode = True  # what ServerLive answers
        self.cancelled, self.may_go, self.may_check = threading.Event(), threading.Event(), threading.Event()
        self.may_check.set()
        self._server = grpc.server(ThreadPoolExecutor(num_threads))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> FakeModels:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go.set()
        self.may_check.set()
        self._server.stop(0)

    # names are those of the protocol

    def ServerLive(self, request: Any, context: Any) -> Any:
        if isinstance(self.live, grpc.StatusCode):
            context.abort(self.live, "Server exiting")
        return service_pb2.ServerLiveResponse(live=self.live)

    def ModelInfer(self, request: Any, context: Any) -> Any:
        texts = [text.decode() for text in deserialize_bytes_tensor(request.raw_input_contents[-1])]
        if request.model_name == "quality":
            return _reply(score=np.array([[0.5]], np.float32), checks=_strings([["{}"]]))
        if request.model_name == "injection":
            flagged = np.array([["IGNORE" in text] for text in texts])
            names = _strings([["injection" if "IGNORE" in text else ""] for text in texts])
            return _reply(flagged=flagged, categories=names, scores=flagged.astype(np.float32) / 2)
        if request.model_name != "safety":
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.model_name}' is not found")
        self.checked += texts
        self.may_check.wait(PATIENCE_S)
        flagged = np.array([["BAD" in text] for text in texts])
        categories = _strings([["violence" if "BAD" in text else ""] for text in texts])
        return _reply(flagged=flagged, categories=categories, scores=flagged.astype(np.float32))

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        context.add_callback(self.cancelled.set)
        for request in request_iterator:
            self.requests.append(request)
            for piece in self._llm(self, context):
                if piece.startswith(ERROR):
                    yield service_pb2.ModelStreamInferResponse(error_message=piece.removeprefix(ERROR))
                    continue
                outputs = {"text_output": _strings([piece]), "finish_reason": _strings([""])}
                counts = {"num_input_tokens": np.array([7], np.uint32), "num_output_tokens": np.array([1], np.uint32)}
                yield service_pb2.ModelStreamInferResponse(infer_response=_reply(**outputs, **counts))
            yield service_pb2.ModelStreamInferResponse()  # the empty last one


def _strings(values: Any) -> np.ndarray:
    return np.array([[v.encode() for v in row] if isinstance(row, list) else row.encode() for row in values], object)


def _reply(**tensors: np.ndarray) -> Any:
    reply = service_pb2.ModelInferResponse()
    for name, values in tensors.items():
        reply.outputs.add(name=name, datatype=np_to_triton_dtype(values.dtype), shape=values.shape)
        raw = serialize_byte_tensor(values).item() if values.dtype == np.object_ else values.tobytes()
        reply.raw_output_contents.append(raw)
    return reply
