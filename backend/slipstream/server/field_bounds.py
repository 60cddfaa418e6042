"""Bounds of request fields with many entries: what is refused costs no more than what is accepted.

pydantic makes an error of each wrong entry, about 1 kB and 4 us. A body of 1 MiB had 700,000: 3 s of the event loop. So
a list ends at its first error, an object is counted before its entries are looked at, and JSON has one error as a
whole. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

MAX_JSON_DEPTH = 200  # json.dumps and templates recurse into it


def entries(most: int | None, least: int | None = None) -> Any:
    """Bounds of a list, for `Annotated`."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def pairs(most: int) -> BeforeValidator:
    """The bound of an object of typed values, beside the Field(max_length=most) that the schema shows."""
    return BeforeValidator(_counting(most))


def _counting(most: int) -> Callable[[Any], Any]:
    def count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            told = {"count": len(value), "most": most}
            raise PydanticCustomError("too_long", "has {count} entries, accepted: at most {most}", told)
        return value

    return count


def _check_json(value: Any) -> Any:
    """Looks at a level of the JSON at a time, and at each type in it once."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        kinds = set(map(type, level))
        if float in kinds and not all(math.isfinite(entry) for entry in level if isinstance(entry, float)):
            raise PydanticCustomError("finite_number", "has NaN or an infinite number, accepted: finite numbers")
        if not kinds & {dict, list}:
            return value
        inner = (entry.values() if isinstance(entry, dict) else entry for entry in level if type(entry) in (dict, list))
        level = list(chain.from_iterable(inner))
    raise PydanticCustomError(
        "too_deep", "is nested too deeply, accepted: at most {most} levels", {"most": MAX_JSON_DEPTH}
    )


IS_JSON = AfterValidator(_check_json)  # of a list at once: it takes 1.5 us each time
AnyObject = dict[str, Any]
JsonObject = Annotated[AnyObject, IS_JSON]
