"""A stand-in for `triton_python_backend_utils`, which exists inside Triton's stub process only.

As much of it as slipstream.encoders imports and `guarded` needs for one request; the model that its BLS calls reach is
a function of the test.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Model = Callable[["InferenceRequest"], Iterator["InferenceResponse"]]


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

    def message(self) -> str:
        return self.text

    def code(self) -> int:
        return self.number


class TritonModelException(Exception):
    pass


@dataclass
class InferenceResponse:
    tensors: list[Tensor] = field(default_factory=list)
    failure: TritonError | None = None

    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.tensors, self.failure = output_tensors or [], error

    def has_error(self) -> bool:
        return self.failure is not None

    def error(self) -> TritonError | None:
        return self.failure

    def output_tensors(self) -> list[Tensor]:
        return self.tensors


@dataclass
class InferenceRequest:
    """Both the request that the guard serves and one that it makes. model: who answers it; see `fake_utils`."""

    inputs: list[Tensor]
    model_name: str = ""
    request_id: str = ""
    requested_output_names: list[str] = field(default_factory=list)
    text_parameters: str = ""
    model: Model | None = None

    def parameters(self) -> str:
        return self.text_parameters

    def exec(self, decoupled: bool) -> Iterator[InferenceResponse]:
        assert decoupled and self.model is not None
        return self.model(self)


@dataclass
class Sender:
    sent: list[InferenceResponse] = field(default_factory=list)
    num_ends: int = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if response is not None:
            self.sent.append(response)
        self.num_ends += flags

    def is_cancelled(self) -> bool:
        return False


def _tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs if tensor.name() == name), None)


def fake_utils(model: Model) -> types.ModuleType:
    """The module. model: answers every decoupled BLS call."""

    def make_request(parameters: Any = None, **fields: Any) -> InferenceRequest:
        return InferenceRequest(**fields, model=model)

    module = types.ModuleType("triton_python_backend_utils")
    names: dict[str, Any] = {
        "Tensor": Tensor,
        "TritonError": TritonError,
        "TritonModelException": TritonModelException,
        "InferenceResponse": InferenceResponse,
        "InferenceRequest": make_request,
        "get_input_tensor_by_name": _tensor_by_name,
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": 1,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module
