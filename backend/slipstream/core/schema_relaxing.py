"""What a grammar can enforce of a JSON schema, for clients that ask for no more (`strict: false`).

On the gateway's event loop, if the request is small or has failed: size, keywords and walks are bounded.
"""

from __future__ import annotations

import json
from typing import Any

from slipstream.core.regex_syntax import UnenforcedError
from slipstream.core.schema_keywords import SELECTORS, TYPED, faults

MOST_CHARS = 1 << 15  # 20 ms in the worst case; a request has no bound of its own for a schema
MOST_DROPPED = 16
_MOST_WALKS = 3  # the second finds what refers to something that the first has taken out
_ALLOWS_MORE = frozenset(("nullable",))  # without it the schema would forbid what it allows
_COMBINING = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
_OF_OBJECTS = frozenset(name for name, types in TYPED.items() if types == ("object",)) | {"type"}
# Objects have no properties but those that they name, or those that these do: without them, any.
_NAMES_PROPERTIES = frozenset(("patternProperties", "allOf"))
_MAY_NAME_PROPERTIES = _COMBINING | frozenset(
    (
        *("required", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$dynamicRef", "$recursiveRef"),
    )
)


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy without the keywords that no grammar can hold an answer to.

    Raises UnenforcedError for a keyword that cannot be left out, for more than MOST_DROPPED, and for a schema of more
    than MOST_CHARS.
    """
    text = json.dumps(schema)
    if len(text) > MOST_CHARS:
        raise UnenforcedError(f"{len(text)} characters, accepted: at most {MOST_CHARS}")
    copy: dict[str, Any] = json.loads(text)
    num_dropped = 0
    for _ in range(_MOST_WALKS):
        is_changed = False
        for error in faults(copy):
            if error.schema is None or error.keyword in _ALLOWS_MORE or num_dropped == MOST_DROPPED:
                raise error
            _drop(error.schema, error.keyword)
            num_dropped, is_changed = num_dropped + 1, True
        if not is_changed:
            return copy
    raise UnenforcedError(f"keywords that cannot be enforced after {_MOST_WALKS} walks")


def _drop(schema: dict[str, Any], keyword: str) -> None:
    selector = next((name for name in SELECTORS if name in schema), "")
    if selector in _COMBINING and keyword in _OF_OBJECTS and schema.get("properties"):
        keyword = selector  # else what it chooses from would forbid these properties
    kept = _known_names(schema) if keyword == "required" else []
    del schema[keyword]
    if kept:
        schema["required"] = kept
    if "properties" not in schema or keyword not in _NAMES_PROPERTIES | _MAY_NAME_PROPERTIES:
        return
    schema.pop("unevaluatedProperties", None)
    if keyword in _NAMES_PROPERTIES or "additionalProperties" not in schema:
        schema["additionalProperties"] = True


def _known_names(schema: dict[str, Any]) -> list[str]:
    """Of the required names those that are properties, if others are none: those alone cannot be enforced."""
    required, properties = schema.get("required"), schema.get("properties")
    if not (isinstance(required, list) and isinstance(properties, dict)):
        return []
    kept = [name for name in required if isinstance(name, str) and name in properties]
    return kept if len(kept) < len(required) else []
