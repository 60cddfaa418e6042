"""Parses a request of `guarded`: tensors and parameters into plain values, or a refusal that names the field.

Runs in Triton's thread; the memory of a request's tensors is invalid after the call returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from slipstream.core.errors import RequestError
from slipstream.core.setting_values import parse_json, read_int, shown
from slipstream.encoders.serving import CharBound, decode, read_texts
from slipstream.encoders.text_tensors import strings

_FORWARDED = ("sampling_parameters", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_words")
_ASKED_FOR = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output")
_SEQUENCE_COUNTS = ("n", "best_of", "num_return_sequences", "sampling_param_best_of")


@dataclass(frozen=True)
class GuardedRequest:
    """inputs, parameters, timeout_us: passed on to the LLM."""

    prompt: str
    is_streaming: bool
    inputs: Mapping[str, np.ndarray]
    parameters: Mapping[str, Any]
    timeout_us: int


def read_request(request: Any, max_prompt_chars: int) -> GuardedRequest:
    """Raises RequestError."""
    prompts = read_texts(request, "text_input", CharBound(max_prompt_chars, "max_prompt_chars"))
    if len(prompts) != 1 or not prompts[0]:
        raise RequestError("text_input", "accepted: one text that is not empty")
    inputs = {"text_input": strings([prompts])[0], "stream": np.array([True])}
    inputs.update({name: np.array([True]) for name in _ASKED_FOR})
    for name in _FORWARDED:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is not None:
            inputs[name] = tensor.as_numpy().copy()
    parameters = parse_json("request parameters", request.parameters() or "{}", "a JSON object")
    _refuse_several(parameters, inputs.get("sampling_parameters"))
    stream = pb_utils.get_input_tensor_by_name(request, "stream")
    is_streaming = stream is not None and bool(stream.as_numpy().reshape(-1)[0])
    return GuardedRequest(prompts[0], is_streaming, inputs, parameters, request.timeout())


def _refuse_several(parameters: Mapping[str, Any], sampling: np.ndarray | None) -> None:
    """Raise RequestError for more than one sequence: their tokens arrive interleaved and could not be checked."""
    text = parameters.get("sampling_parameters") if sampling is None else sampling.reshape(-1)[0]
    given: Any = text
    if isinstance(text, (str, bytes)):  # the LLM takes the settings as a tensor or as a request parameter
        given = parse_json("sampling_parameters", decode("sampling_parameters", text), "a JSON object")
    for settings in (parameters, given if isinstance(given, dict) else {}):
        for name in _SEQUENCE_COUNTS:
            value = settings.get(name)
            if value is not None and read_int(name, value) != 1:  # as the LLM reads it: null is as if absent
                raise RequestError(name, f"got {shown(value)}; accepted: 1, because each answer is checked by itself")
        width = settings.get("beam_width")  # all beams are returned unless `n` says how many
        if width is not None and read_int("beam_width", width) > 1:
            told = f"got {shown(width)}; accepted: 0 or 1, because each answer is checked by itself"
            raise RequestError("beam_width", told)
