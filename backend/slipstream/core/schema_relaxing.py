"""What a grammar can enforce of a JSON schema, for clients that ask for no more (`strict: false`)."""

from __future__ import annotations

import json
from typing import Any

from slipstream.core.regex_syntax import UnenforcedError
from slipstream.core.schema_keywords import check_schema

MOST_DROPPED = 16  # each costs a check of the whole schema
_ALLOWS_MORE = frozenset(("nullable",))  # without it the schema would forbid what it allows
_NAMES_PROPERTIES = frozenset(("patternProperties", "allOf"))  # without them such properties would be others


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy without the keywords that no grammar can hold an answer to.

    Raises UnenforcedError for a keyword that cannot be left out, and for more than MOST_DROPPED.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for _ in range(MOST_DROPPED):
        try:
            check_schema(copy)
            return copy
        except UnenforcedError as error:
            if error.schema is None or error.keyword in _ALLOWS_MORE:
                raise
            del error.schema[error.keyword.replace("~1", "/").replace("~0", "~")]
            if error.keyword in _NAMES_PROPERTIES and "properties" in error.schema:
                error.schema.pop("unevaluatedProperties", None)
                error.schema["additionalProperties"] = True
    check_schema(copy)
    return copy
