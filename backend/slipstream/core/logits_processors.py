"""Logits processors by name: classes of the operator, which a request asks for with arguments.

Only the parameter `logits_processors` names code; a client sends names and JSON. Standard library only: what a class
is given, and when it runs, is in worker/sample/named_processors.py.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.setting_values import check_text, parse_json, refuse, shown

PARAMETER = "logits_processors"
MAX_LOGITS_PROCESSORS = 16
_MAX_REASON_CHARS = 500  # of what a class says against its arguments
ACCEPTED = (
    f'a list of at most {MAX_LOGITS_PROCESSORS} names, or of objects {{"name": ..., "kwargs": {{...}}}}, each name once'
)
_ENTRY = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<module>[A-Za-z_][\w.]*):(?P<class>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class ProcessorCall:
    """One processor of a request, and its arguments: what JSON can say."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def read_calls(name: str, value: object) -> tuple[ProcessorCall, ...]:
    """Calls of a list, one object, one name, or JSON of these. Raises RequestError."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = parse_json(name, value, ACCEPTED)
    if isinstance(value, str):
        value = [value] if value else []
    entries = [value] if isinstance(value, dict | ProcessorCall) else value
    if not isinstance(entries, Sequence) or len(entries) > MAX_LOGITS_PROCESSORS:
        raise refuse(name, value, ACCEPTED)
    calls = tuple(_read_call(name, entry) for entry in entries)
    check_calls(name, calls)
    return calls


def check_calls(name: str, calls: Any) -> None:
    """Raises RequestError for calls that read_calls could not have returned."""
    is_list = isinstance(calls, tuple) and len(calls) <= MAX_LOGITS_PROCESSORS
    if not is_list or not all(isinstance(call, ProcessorCall) for call in calls):
        raise refuse(name, calls, ACCEPTED)
    names = {call.name for call in calls}
    if "" in names or len(names) < len(calls):
        raise refuse(name, [call.name for call in calls], ACCEPTED)


def _read_call(name: str, entry: object) -> ProcessorCall:
    if isinstance(entry, ProcessorCall):
        return entry
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, dict):
        raise refuse(name, entry, ACCEPTED)
    known = {key: value for key, value in entry.items() if value not in (None, [])}  # vLLM's objects may have `args`
    called = known.pop("name", None) or known.pop("qualname", None)
    kwargs = known.pop("kwargs", {})
    if known or not isinstance(called, str) or not isinstance(kwargs, dict):
        raise refuse(name, entry, ACCEPTED)
    check_text(name, called)
    return ProcessorCall(called, kwargs)


def named_classes(text: str) -> dict[str, tuple[str, str]]:
    """Name -> (module, class) of the parameter's value, in its order. Raises ValueError."""
    found: dict[str, tuple[str, str]] = {}
    for entry in text.split(",") if text.strip() else ():
        matched = _ENTRY.fullmatch(entry.strip())
        if matched is None:
            raise ValueError(entry)
        name = matched["name"] or matched["class"]
        if name in found:
            raise ValueError(f"{name} twice")
        found[name] = matched["module"], matched["class"]
    return found


def load_classes(text: str, folders: Sequence[str]) -> dict[str, type]:
    """Import the classes of the parameter's value. folders: where modules may be besides the Python path, behind it, so
    that none hides a module of Python's. Raises ConfigError."""
    classes = {}
    for name, (module, class_name) in named_classes(text).items():
        for folder in folders:
            if folder not in sys.path:
                sys.path.append(folder)
        try:
            found = getattr(importlib.import_module(module), class_name)
        except Exception as error:  # the operator's module may raise anything
            where = f"{module}:{class_name}"
            raise ConfigError(PARAMETER, where, f"cannot be imported: {type(error).__name__}: {error}") from error
        if not (isinstance(found, type) and callable(getattr(found, "apply", None))):
            raise ConfigError(PARAMETER, f"{module}:{class_name}", "accepted: a class with a method `apply`")
        classes[name] = found
    return classes


class ServedProcessors:
    """Those of a model, by name. max_bytes: of a request's arguments as JSON."""

    def __init__(self, model: ModelConfig, max_bytes: int) -> None:
        self._classes = load_classes(model.logits_processors, model.logits_processor_folders)
        self._max_bytes = max_bytes

    def check(self, calls: Sequence[ProcessorCall]) -> None:
        """Raises RequestError for a name that is not served, and for arguments that are too long or that their class
        refuses: its `validate` runs here, on the submitting thread."""
        for call in calls:
            if call.name not in self._classes:
                served = ", ".join(self._classes) or "none: its parameter `logits_processors` names no class"
                raise refuse(PARAMETER, call.name, f"one of those that the model serves: {served}")
        if calls:
            self._check_size(calls)
        for call in calls:
            self._validate(call)

    def _check_size(self, calls: Sequence[ProcessorCall]) -> None:
        try:
            num_bytes = len(json.dumps([dict(call.kwargs) for call in calls]))
        except (TypeError, ValueError, RecursionError):
            raise RequestError(PARAMETER, "accepted: `kwargs` that JSON can say") from None
        if num_bytes > self._max_bytes:
            accepted = f"accepted: at most max_logits_processor_bytes={self._max_bytes}"
            raise RequestError(PARAMETER, f"got `kwargs` of {num_bytes} bytes as JSON, {accepted}")

    def _validate(self, call: ProcessorCall) -> None:
        validate = getattr(self._classes[call.name], "validate", None)
        if validate is None:
            return
        try:
            validate(dict(call.kwargs))
        except Exception as error:  # whatever it raises is against the arguments
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            said = f"{call.name} refuses {shown(dict(call.kwargs))}: {reason[:_MAX_REASON_CHARS]}"
            raise RequestError(PARAMETER, said) from None
