"""Requests to a running tritonserver, as real clients send them: gRPC streams and HTTP, for tests of every way in."""

from __future__ import annotations

import http.client
import json
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from patience import PATIENCE_S
from tritonclient.utils import np_to_triton_dtype

TIMEOUT_S = 2 * PATIENCE_S


@dataclass
class Answer:
    """All responses to one request: output arrays per response, the error that ended it, arrival times."""

    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    error: str = ""
    arrivals: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(r["text_output"].reshape(-1)[0] for r in self.responses if "text_output" in r).decode()

    def last(self, name: str) -> Any:
        """The first element of an output in the last response that has it."""
        return next(r[name] for r in reversed(self.responses) if name in r).reshape(-1)[0]

    def all(self, name: str) -> list[Any]:
        return [r[name].reshape(-1)[0] for r in self.responses if name in r and r[name].size]


def as_array(value: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A Python value as the tensor that its type suggests: str BYTES, bool BOOL, int INT32, float FP32; lists too."""
    if isinstance(value, np.ndarray):
        array = value
    else:
        values = value if isinstance(value, list) else [value]
        first = values[0] if values else 0
        if isinstance(first, (str, bytes)):
            values = [v.encode() if isinstance(v, str) else v for v in values]
            array = np.array(values, dtype=np.object_)
        else:
            array = np.array(values, dtype={bool: np.bool_, int: np.int32, float: np.float32}[type(first)])
    return array if shape is None else array.reshape(shape)


class GrpcStream:
    """One gRPC stream; several requests may run on it, told apart by request id."""

    def __init__(self, url: str, deadline_s: float | None = None) -> None:
        """deadline_s: gRPC's own, of the whole stream."""
        self.answers: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        self._client = grpc_client.InferenceServerClient(url)
        self._client.start_stream(
            lambda result, error: self.answers.put((time.perf_counter(), result, error)), stream_timeout=deadline_s
        )

    def send(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: tuple[str, ...] = (),
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_us: int | None = None,
        batched: bool = False,
    ) -> None:
        """batched: give every tensor a leading dimension of 1, as the TensorRT-LLM ensemble's clients do."""
        tensors = []
        for name, value in inputs.items():
            array = as_array(value)
            if batched:
                array = array[None]
            tensor = grpc_client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        self._client.async_stream_infer(
            model,
            tensors,
            outputs=[grpc_client.InferRequestedOutput(name) for name in outputs] or None,
            parameters=dict(parameters) if parameters else None,
            request_id=request_id,
            timeout=timeout_us,
            enable_empty_final_response=True,
        )

    def receive(self, timeout_s: float = TIMEOUT_S) -> tuple[dict[str, np.ndarray], bool, str]:
        """(outputs, is the last of its request, error text)."""
        _, result, error = self.answers.get(timeout=timeout_s)
        if error is not None:
            return {}, True, str(error)
        reply = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in reply.outputs}
        return outputs, reply.parameters["triton_final_response"].bool_param, ""

    def collect(self, timeout_s: float = TIMEOUT_S) -> Answer:
        """Everything of the one request that runs, to its end."""
        answer, is_last = Answer(), False
        while not is_last:
            outputs, is_last, answer.error = self.receive(timeout_s)
            if outputs:
                answer.responses.append(outputs)
                answer.arrivals.append(time.perf_counter())
        return answer

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@contextmanager
def grpc_stream(url: str, cancel: bool = False) -> Iterator[GrpcStream]:
    stream = GrpcStream(url)
    try:
        yield stream
    finally:
        stream.close(cancel)


def grpc_infer(url: str, model: str, inputs: Mapping[str, Any], **options: Any) -> Answer:
    """One request on a stream of its own, whole."""
    with grpc_stream(url) as stream:
        stream.send(model, inputs, **options)
        return stream.collect()


def http_generate(url: str, model: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """POST generate: (status, JSON)."""
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", f"/v2/models/{model}/generate", json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


@contextmanager
def http_events(url: str, model: str, body: Mapping[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """POST generate_stream: the events as they come; leaving the block closes the connection."""
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        yield (json.loads(line[5:]) for line in reply if line.startswith(b"data:"))
    finally:
        connection.close()


def http_stream(url: str, model: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    with http_events(url, model, {"stream": True, **body}) as events:
        return list(events)
