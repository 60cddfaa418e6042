"""A fake of `triton_python_backend_utils`, which exists only inside Triton's stub process.

Contains what slipstream.encoders uses: a request, its response sender, tensors and errors.
"""

from __future__ import annotations

import threading
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from patience import PATIENCE_S


@dataclass
class Tensor:
    _name: str
    values: np.ndarray

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self.values


@dataclass
class TritonError:
    INVALID_ARG, INTERNAL, UNAVAILABLE = 3, 1, 4  # no fields
    text: str
    number: int = 1


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.values for tensor in output_tensors or []}
        self.error = error


@dataclass
class Sender:
    """is_gone: whether the client cancelled, or the exception of that query; has_ended: set by the final flag."""

    sent: list[InferenceResponse] = field(default_factory=list)
    num_ends: int = 0
    is_gone: bool | Exception = False
    has_ended: threading.Event = field(default_factory=threading.Event)

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.num_ends, "a response after the last"
        if response is not None:
            self.sent.append(response)
        self.num_ends += flags
        if flags:
            self.has_ended.set()

    def is_cancelled(self) -> bool:
        if isinstance(self.is_gone, Exception):
            raise self.is_gone
        return self.is_gone

    def wait(self, timeout_s: float = PATIENCE_S) -> Sender:
        assert self.has_ended.wait(timeout_s), "the request never ended"
        return self

    @property
    def text(self) -> str:
        return b"".join(one.outputs["text_output"][0] for one in self.sent if one.error is None).decode()

    @property
    def error(self) -> TritonError:
        [error] = [one.error for one in self.sent if one.error is not None]
        return error


@dataclass
class InferenceRequest:
    inputs: list[Tensor]
    text_parameters: str = ""
    timeout_us: int = 0
    sender: Sender = field(default_factory=Sender)

    def parameters(self) -> str:
        return self.text_parameters

    def timeout(self) -> int:
        return self.timeout_us

    def get_response_sender(self) -> Sender:
        return self.sender


def _tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs if tensor.name() == name), None)


def fake_utils() -> types.ModuleType:
    module = types.ModuleType("triton_python_backend_utils")
    names: dict[str, Any] = {
        "Tensor": Tensor,
        "TritonError": TritonError,
        "InferenceResponse": InferenceResponse,
        "get_input_tensor_by_name": _tensor_by_name,
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": 1,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module
