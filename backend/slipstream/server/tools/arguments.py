"""The arguments of a tool's call as an object, from the text that a model wrote. Pure functions.

Only for APIs that have an object there: where the arguments are text, as OpenAI's, they are the model's own.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_ARGUMENT_DEPTH = 100  # what clients can read is some 200, and less than Python's own


def read_arguments(text: str) -> Any:
    """A value that every program can read as JSON: null for NaN, Infinity and numbers beyond a double, as JavaScript
    writes them, and "?" for half a surrogate.

    Raises ValueError for what is no JSON, as of a call that was cut off, or nested deeper than MAX_ARGUMENT_DEPTH.
    """
    try:
        return _plain(json.loads(text or "{}"), MAX_ARGUMENT_DEPTH)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_plain(entry, depth - 1) for entry in value]
    return {_plain(key, depth): _plain(entry, depth - 1) for key, entry in value.items()}
