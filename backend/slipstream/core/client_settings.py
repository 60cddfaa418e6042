"""The settings of a request from its three sources, merged in one order: tensor > request parameter > JSON > default.

Standard library only, no state. A name is an input tensor of the contract or a field of vLLM's sampling parameters;
each sets one target, whose reader gives its type. Two names of one target that disagree within a source are an error.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from slipstream.core import setting_values as read
from slipstream.core.contract_generate import INPUTS
from slipstream.core.errors import RequestError
from slipstream.core.tensor_spec import InputSpec, Use
from slipstream.core.wire_messages import DataType, Request

# target -> reader of its value. Every target of the contract is here (tests/unit/test_contract.py).
READERS: dict[str, read.Reader] = {
    "prompt": read.read_text,
    "prompt_token_ids": read.read_ids,
    "prompt_length": read.read_int,
    "sampling_parameters": read.read_object,
    "add_special_tokens": read.read_bool,
    "max_tokens": read.read_int,
    "min_tokens": read.read_int,
    "end_id": read.read_int,
    "stop": read.read_texts,
    "stop_token_ids": read.read_ids,
    "stop_words_ids": read.read_words_ids,
    "bad_words": read.read_texts,
    "bad_words_ids": read.read_words_ids,
    "ignore_eos": read.read_bool,
    "include_stop_str_in_output": read.read_bool,
    "skip_special_tokens": read.read_bool,
    "temperature": read.read_float,
    "top_k": read.read_int,
    "top_p": read.read_float,
    "min_p": read.read_float,
    "repetition_penalty": read.read_float,
    "presence_penalty": read.read_float,
    "frequency_penalty": read.read_float,
    "seed": read.read_int,
    "n": read.read_int,
    "best_of": read.read_int,
    "logprobs": read.read_int,
    "prompt_logprobs": read.read_int,
    "logit_bias": read.read_logit_bias,
    "bias_words": read.read_texts,
    "bias_weights": read.read_numbers,
    "bias_vector": read.read_numbers,
    "num_draft_tokens": read.read_int,
    "speculative_method": read.read_text,
    "speculative_acceptance": read.read_text,
    "reference_text": read.read_text,
    "reference_ids": read.read_ids,
    "guide_type": read.read_text,
    "guide_text": read.read_text,
    "guided_decoding": read.read_object,
    "stream": read.read_bool,
    "stream_interval": read.read_int,
    "exclude_input_in_output": read.read_bool,
    "stop_request": read.read_bool,
    "priority": read.read_int,
    "cache_salt": read.read_text,
    "timeout_ms": read.read_int,
    "timeout_us": read.read_int,
    "request_id": read.read_text,
}
READERS |= {spec.target: read.read_bool for spec in INPUTS if spec.target.startswith("return_")}

# Names that no tensor has: fields of vLLM's SamplingParams.
_JSON_NAMES = {
    name: name
    for name in (
        "n",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "best_of",
        "guided_decoding",
    )
} | {"structured_outputs": "guided_decoding"}
_JSON_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "detokenize": ((True,), "text is always made"),
    "spaces_between_special_tokens": ((True,), "special tokens are shown as they are"),
    "use_beam_search": ((False,), "there is no beam search"),
    "truncate_prompt_tokens": ((), "a prompt is never cut silently"),
    "allowed_token_ids": ((), "use logit_bias or guided decoding"),
}
TENSORS: dict[str, InputSpec] = {spec.name: spec for spec in INPUTS}
# Fields of Triton's own that HTTP `generate` (2.51) takes for parameters. Its timeout counts in microseconds.
_PARAMETER_NAMES = {"id": "request_id", "request_id": "request_id", "timeout": "timeout_us"}
_NOT_IN_JSON = frozenset(
    {"request_id", "prompt", "prompt_token_ids", "prompt_length", "sampling_parameters", "stop_request"}
)

Settings = dict[str, Any]


def read_settings(raw: Request, has_batch_dim: bool = False, ignored: str = "") -> Settings:
    """Target -> value of everything the client said. Raises RequestError for a name or value that is not accepted.

    ignored: comma-separated patterns of request parameters to pass over (headers that Triton forwards, for example).
    """
    tensors = _from_tensors(raw, has_batch_dim)
    given = raw.parameters
    if ignored and given:
        patterns = [pattern.strip() for pattern in ignored.split(",")]
        given = {name: given[name] for name in given if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    for name, value in given.items():
        read.check_text(name, name)
        read.check_text(name, value)
    parameters = _from_mapping(given, _parameter_target)
    sampling = tensors.get("sampling_parameters", parameters.get("sampling_parameters"))
    settings = _from_mapping(sampling, _json_target) if sampling else {}
    settings.update(parameters)
    settings.update(tensors)
    settings.pop("sampling_parameters", None)
    return settings


def _from_tensors(raw: Request, has_batch_dim: bool) -> Settings:
    source = _Source()
    for tensor in raw.inputs:
        spec = TENSORS.get(tensor.name)
        if spec is None:
            raise unknown(tensor.name, "input tensor", TENSORS)
        values = read.tensor_values(tensor, spec, has_batch_dim)
        if spec.use is Use.NEUTRAL_ONLY:
            check_neutral(spec.name, values, spec.neutral, spec.reason)
        elif spec.use is Use.SERVED:
            if spec.dtype is DataType.BYTES and spec.dims != (1,):
                values = [text for text in values if text]  # TensorRT-LLM clients send [""] for no word
            source.set(spec.name, spec.target, values[0] if spec.dims == (1,) else values)
    return source.settings


def _from_mapping(mapping: Mapping[str, Any], target_of: Any) -> Settings:
    """Request parameters or the JSON object. A JSON null is as if absent."""
    source = _Source()
    for name, value in mapping.items():
        if value is None:
            continue
        spec = TENSORS.get(name)
        if name in _JSON_NEUTRAL:
            check_neutral(name, [value], *_JSON_NEUTRAL[name])
        elif spec is not None and spec.use is Use.NEUTRAL_ONLY:
            check_neutral(name, value if isinstance(value, list) else [value], spec.neutral, spec.reason)
        elif spec is None or spec.use is Use.SERVED:
            source.set(name, target_of(name, value), value)
    return source.settings


def _parameter_target(name: str, value: object) -> str:
    if name == "stop" and not isinstance(value, bool):
        return "stop"  # as text it is a stop string, as a truth value the request to stop
    if name in _PARAMETER_NAMES:
        return _PARAMETER_NAMES[name]
    return _target(name, "request parameter", frozenset())


def _json_target(name: str, value: object) -> str:
    if name == "stop":
        return "stop"
    return _target(name, "sampling parameter", _NOT_IN_JSON)


def _target(name: str, what: str, excluded: frozenset[str]) -> str:
    spec = TENSORS.get(name)
    target = spec.target if spec is not None else _JSON_NAMES.get(name)
    if target is None or target in excluded:
        raise unknown(name, what, names(excluded))
    return target


def names(excluded: frozenset[str] = frozenset()) -> list[str]:
    """Every name of a setting that is served, for messages and documentation."""
    tensors = [spec.name for spec in INPUTS if spec.use is Use.SERVED and spec.target not in excluded]
    return sorted({*tensors, *_JSON_NAMES})


class _Source:
    """The settings of one source, and under which name each was given."""

    def __init__(self) -> None:
        self.settings: Settings = {}
        self._given_as: dict[str, str] = {}

    def set(self, name: str, target: str, value: object) -> None:
        typed = READERS[target](name, value)
        if target in self.settings and self.settings[target] != typed:
            other = self._given_as[target]
            raise RequestError(name, f"got {read.shown(value)}, but {other} is the same setting and has another value")
        self.settings[target] = typed
        self._given_as[target] = name


def check_neutral(name: str, values: list[Any], neutral: tuple[object, ...], reason: str) -> None:
    """Of a name that is declared but not served, only values that ask for nothing pass."""
    for value in values:
        if not any(_is_same(value, accepted) for accepted in neutral):
            accepted = " or ".join(map(repr, neutral)) if neutral else "nothing (leave it out or empty)"
            raise read.refuse(name, value, f"{accepted}, because {reason}")


def _is_same(value: object, accepted: object) -> bool:
    if isinstance(value, float) and isinstance(accepted, float | int):
        return math.isclose(value, accepted, rel_tol=1e-6, abs_tol=1e-12)
    return value == accepted


def unknown(name: str, what: str, known: Any) -> RequestError:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {close[0]}?" if close else f"accepted: {', '.join(sorted(known))}"
    return RequestError(name, f"unknown {what}; {hint}")


def json_only_names() -> list[str]:
    """Names that no tensor has."""
    return sorted(set(names()) - set(TENSORS))
