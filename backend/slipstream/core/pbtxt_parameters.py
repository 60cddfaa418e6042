"""Parameters that a config.pbtxt gives twice, which Triton's parser does not say: of two values the last one counts.

Standard library only. Reads as much of protobuf's text format as it takes to find `parameters`; Triton has refused what
is malformed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.core.errors import ConfigError

_STRINGS = r"""#[^\n]*|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_TOKEN = re.compile(_STRINGS + r"""|[{}<>]|[^\s{}<>"'#\[\]:,;]+""", re.S)
_ESCAPE = re.compile(r"\\(.)", re.S)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def config_path(model_dir: Path, config_name: str = "") -> Path:
    """The configuration of a model that Triton reads. config_name: the server's --model-config-name, "" without."""
    named = model_dir / "configs" / f"{config_name}.pbtxt"
    return named if config_name and named.exists() else model_dir / "config.pbtxt"


def check_given_once(path: Path, parameters: Mapping[str, str]) -> None:
    """Raises ConfigError for a parameter that a config.pbtxt gives twice, as different values.

    parameters: by name, what Triton has read. A load may bring a configuration of its own instead of the file: then its
    values are others, and the file does not count.
    """
    if not path.is_file():
        return
    seen: dict[str, str] = {}
    for name, value in read_parameters(path.read_text("utf-8", errors="replace")):
        former = seen.setdefault(name, value)
        if former != value and parameters.get(name) in (former, value):
            told = f"given twice in {path.name}, also as {former!r}, and the last one would count"
            raise ConfigError(name, value, f"{told}; accepted: one of them")


def read_parameters(text: str) -> Iterator[tuple[str, str]]:
    """Key and string_value of each entry of `parameters`, in order."""
    path: list[str] = []
    name, key, value = "", "", ""
    for token in _TOKEN.findall(text):
        if token in "{<":
            path.append(name)
            if path == ["parameters"]:
                key = value = ""
        elif token in "}>":
            if path == ["parameters"]:
                yield key, value
            name = path.pop() if path else ""  # of the next message of a list, too
        elif token[0] not in "\"'#":
            name = token
        elif token[0] == "#":
            continue
        elif path == ["parameters"] and name == "key":
            key += _unquoted(token)
        elif path == ["parameters", "value"] and name == "string_value":
            value += _unquoted(token)


def _unquoted(token: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), token[1:-1])
