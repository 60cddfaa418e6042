"""The settings of a request from its three sources, merged in one order: tensor > request parameter > JSON > default.

Standard library only, no state. Each name sets one setting of the table (settings.py). The setting's kind reads and
checks the value here, once, under the name that the client gave. Two names of one setting that have different values
in one source are an error.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from slipstream.core.errors import RequestError
from slipstream.core.setting_kinds import Numbers
from slipstream.core.setting_values import check_text, refuse, shown
from slipstream.core.settings import KEYS_NOT_SERVED, SETTINGS, Setting
from slipstream.core.trace_context import PROPAGATED
from slipstream.core.wire_messages import DataType, Request
from slipstream.protocol.contract_generate import NOT_SERVED, inputs_of
from slipstream.protocol.tensor_spec import InputSpec, Use
from slipstream.protocol.tensor_values import tensor_matrix, tensor_values

_MEANT = dict.fromkeys(("prompt", "text", "inputs"), "text_input")  # other servers' names of the prompt


class Settings(dict[str, Any]):
    """Setting -> checked value, of the settings that the client gave. given_as: setting -> the name that it used."""

    __slots__ = ("given_as",)

    def __init__(self) -> None:
        super().__init__()
        self.given_as: dict[str, str] = {}

    def put(self, setting: Setting, name: str, value: object) -> None:
        """Raises RequestError for a value that the setting's kind refuses, or that contradicts another name of it."""
        typed = setting.kind.read(name, value)
        if setting.name in self and self[setting.name] != typed:
            other = self.given_as[setting.name]
            raise RequestError(name, f"got {shown(value)}, but {other} is the same setting and has another value")
        self[setting.name] = typed
        self.given_as[setting.name] = name

    def override(self, other: Settings) -> None:
        self.update(other)
        self.given_as.update(other.given_as)

    def spelled(self, name: str) -> str:
        """The name under which the client gave a setting, for messages."""
        return self.given_as.get(name, name)


@dataclass(frozen=True)
class NameIndex:
    """Name -> setting, for each source. tensors: with their declarations, and None for a tensor that is not served."""

    tensors: Mapping[str, tuple[InputSpec, Setting | None]]
    parameters: Mapping[str, Setting]
    json: Mapping[str, Setting]


def index_names(settings: Iterable[Setting]) -> NameIndex:
    tensors: dict[str, tuple[InputSpec, Setting | None]] = {spec.name: (spec, None) for spec in NOT_SERVED}
    parameters: dict[str, Setting] = {}
    json: dict[str, Setting] = {}
    for setting in settings:
        tensors |= {spec.name: (spec, setting) for spec in inputs_of(setting)}
        parameters |= dict.fromkeys((*setting.tensors, *setting.parameters), setting)
        if setting.is_in_json:
            json |= dict.fromkeys(setting.tensors, setting)
    for setting in settings:  # afterwards: `stop` is a tensor of one setting and a key of another
        json |= dict.fromkeys(setting.json, setting)
        parameters |= {name: setting for name in setting.json if name not in parameters}
    return NameIndex(tensors, parameters, json)


INDEX = index_names(SETTINGS)
TENSORS = {name: spec for name, (spec, _) in INDEX.tensors.items()}


def read_settings(raw: Request, has_batch_dim: bool = False, ignored: str = "", index: NameIndex = INDEX) -> Settings:
    """All settings that the client gave. Raises RequestError for a name or value that is not accepted.

    ignored: comma-separated patterns of request parameters to ignore, for example headers that Triton forwards.
    """
    tensors = _from_tensors(raw, has_batch_dim, index)
    given = raw.parameters
    if not PROPAGATED.isdisjoint(given):
        given = {name: value for name, value in given.items() if name not in PROPAGATED}
    if ignored and given:
        patterns = [pattern.strip() for pattern in ignored.split(",")]
        given = {name: given[name] for name in given if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    for name, value in given.items():
        check_text(name, name)
        check_text(name, value)
    parameters = _from_mapping(given, index.parameters, "request parameter", index)
    sampling = tensors.get("sampling_parameters", parameters.get("sampling_parameters"))
    settings = _from_mapping(sampling, index.json, "sampling parameter", index) if sampling else Settings()
    for source in (parameters, tensors):
        if source:
            settings.override(source)
    settings.pop("sampling_parameters", None)
    return settings


def _from_tensors(raw: Request, has_batch_dim: bool, index: NameIndex) -> Settings:
    settings = Settings()
    for tensor in raw.inputs:
        if tensor.name not in index.tensors:
            raise unknown(tensor.name, "input tensor", index.tensors)
        spec, setting = index.tensors[tensor.name]
        if setting is not None and isinstance(setting.kind, Numbers):
            settings.put(setting, spec.name, tensor_matrix(tensor, spec, has_batch_dim))
            continue
        values = tensor_values(tensor, spec, has_batch_dim)
        if setting is not None:
            if spec.dtype is DataType.BYTES and spec.dims != (1,):
                values = [text for text in values if text]  # TensorRT-LLM clients send [""] for no word
            settings.put(setting, spec.name, values[0] if spec.dims == (1,) else values)
        elif spec.use is Use.NEUTRAL_ONLY:
            check_neutral(spec.name, values, spec.neutral, spec.reason)
    return settings


def _from_mapping(mapping: Mapping[str, Any], known: Mapping[str, Setting], what: str, index: NameIndex) -> Settings:
    """Settings of request parameters or of the JSON object. A JSON null counts as absent."""
    settings = Settings()
    for name, value in mapping.items():
        if value is None:
            continue
        setting = known.get(name)
        if name == "stop" and known is index.parameters and not isinstance(value, bool):
            setting = index.json["stop"]  # text is a stop string, true or false the stop request
        if setting is not None:
            settings.put(setting, name, value)
        elif name in KEYS_NOT_SERVED:
            check_neutral(name, [value], *KEYS_NOT_SERVED[name])
        else:
            _check_not_served(name, value, known, what, index)
    return settings


def _check_not_served(name: str, value: object, known: Mapping[str, Setting], what: str, index: NameIndex) -> None:
    spec, setting = index.tensors.get(name, (None, None))
    if spec is None or setting is not None:
        raise unknown(name, what, known)
    if spec.use is Use.NEUTRAL_ONLY:
        check_neutral(name, value if isinstance(value, list) else [value], spec.neutral, spec.reason)


def names(excluded: frozenset[str] = frozenset()) -> list[str]:
    """Every tensor name and JSON key of a setting, without those of the excluded settings."""
    served = [setting for setting in SETTINGS if setting.name not in excluded]
    return sorted({name for setting in served for name in (*setting.tensors, *setting.json)})


def check_neutral(name: str, values: list[Any], neutral: tuple[object, ...], reason: str) -> None:
    """Raises RequestError if a name that is declared but not served has another value than a neutral one."""
    for value in values:
        if not any(_is_same(value, accepted) for accepted in neutral):
            accepted = " or ".join(map(repr, neutral)) if neutral else "nothing (leave it out or empty)"
            raise refuse(name, value, f"{accepted}, because {reason}")


def _is_same(value: object, accepted: object) -> bool:
    if isinstance(value, float) and isinstance(accepted, float | int):
        return math.isclose(value, accepted, rel_tol=1e-6, abs_tol=1e-12)
    return value == accepted


def unknown(name: str, what: str, known: Iterable[str]) -> RequestError:
    names = sorted(known)
    close = [_MEANT[name]] if _MEANT.get(name) in names else []
    if not close and len(name) <= 2 * max(map(len, names), default=0):  # a name of megabytes takes as many ms
        close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"accepted: {', '.join(names)}"
    return RequestError(name, f"unknown {what}; {hint}")
