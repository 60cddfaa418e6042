"""One parameter of config.pbtxt as data, and the bounds that several parameters share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Parameter:
    """name: in config.pbtxt. path: where EngineConfig has it, such as "model.dtype".

    aliases: other backends' names of the same thing. accepted: the words accepted, or "" for any; is_good: a check of
    the typed value, described by `limits`. synonyms: other backends' words -> ours. foreign: other backends' words that
    are refused -> what to do instead.
    """

    name: str
    path: str
    doc: str
    aliases: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    limits: str = ""
    is_good: Callable[[Any], bool] = lambda value: True
    synonyms: Mapping[str, str] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)


def at_least(low: int) -> dict[str, Any]:
    return {"limits": f"an integer >= {low}", "is_good": lambda value: value >= low}


def between(low: int, high: int) -> dict[str, Any]:
    return {"limits": f"an integer from {low} to {high}", "is_good": lambda value: low <= value <= high}


FRACTION: dict[str, Any] = {"limits": "a number in (0, 1]", "is_good": lambda value: 0.0 < value <= 1.0}
