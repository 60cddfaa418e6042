"""`guarded` outside Triton: requests to a loaded model, and how a test asks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from fake_python_backend import InferenceRequest, Sender, Tensor

OF_STUB = tuple(
    f"slipstream.encoders.{name}" for name in ("guarded_serving", "guarded_parts", "guarded_request", "serving")
)
Open = Callable[..., Any]


def request_of(prompt: str = "Hello", sampling: str | None = None, parameters: str = "", **more: Any) -> Any:
    inputs = [Tensor("text_input", np.array([prompt.encode()], dtype=object)), Tensor("stream", np.array([True]))]
    if sampling is not None:
        inputs.append(Tensor("sampling_parameters", np.array([sampling.encode()], dtype=object)))
    return InferenceRequest(inputs, text_parameters=parameters, **more)


def ask(model: Any, *arguments: Any, **options: Any) -> Sender:
    request = request_of(*arguments, **options)
    model.execute([request])
    return request.sender
