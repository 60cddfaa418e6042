"""What pydantic finds wrong with a request, in the words of this API. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.core.setting_values import shown
from slipstream.core.settings import BY_NAME
from slipstream.server.sampling import PASSED_NAMES

_SOURCES = ("body", "query")  # where FastAPI found the value; a field of the body may have such a name, too
_MAX_NAME_CHARS = 64  # of a part of a field's name: keys of an object are the client's


def _specificity(error: Any) -> tuple[bool, int]:
    """Sort key of errors: for a union, the error inside the matching type is more useful than "is not a string"."""
    return not error["type"].endswith("_type"), len(error["loc"])


def explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """The message and field of the first error, without pydantic's names of types and branches.

    For a setting, the engine's message precedes pydantic's.
    """
    first = max(errors, key=_specificity)
    if first["type"] == "json_invalid":
        return f"The request body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    path = list(first["loc"])
    if path and path[0] in _SOURCES:
        path.pop(0)
    field = ""
    for part in path:
        if isinstance(part, int):
            field += f"[{part}]"
        elif (
            len(part) <= _MAX_NAME_CHARS and part.replace("_", "").isalnum() and part not in ("str", "int", "NamedTool")
        ):
            field += f".{part}" if field else part
    words = {"extra_forbidden": "is not a known parameter", "missing": "is missing"}.get(first["type"], first["msg"])
    if not field:
        return f"The request body: {words} (a JSON object is needed, sent as application/json)", None
    if field in PASSED_NAMES:
        words = f"got {shown(first['input'])}, accepted: {BY_NAME[field].kind.accepted} ({words})"
    return f"{field}: {words}", field
