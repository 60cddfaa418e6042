"""Size limits of schemas, regular expressions and grammars, and what of them is enforced, checked before compilation.
Any thread; standard library only.

Small but costly grammars are bounded where they are compiled and matched, by time and memory
(engine/grammar_process.py, engine/grammar_host.py).
"""

from __future__ import annotations

import json
import re
import sys

from slipstream.core.config import StructuredOutputConfig
from slipstream.core.errors import RequestError
from slipstream.core.regex_syntax import UnenforcedError, check_regex
from slipstream.core.sampling_params import Guide
from slipstream.core.schema_keywords import check_schema
from slipstream.core.tag_schemas import check_tag

FIELD = "guided_decoding_guide"
_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
)
_LARGEST = sys.float_info.max  # xgrammar's parser holds numbers in doubles
_TAG_COUNTS = frozenset(("min", "max", "max_chars"))  # of a structural tag's formats
# what is not closed reaches to the end: looking for the end again from each bracket would be quadratic
_CLASS = r"(?:\\(?:.|\Z)|[^\]\\])*(?:\]|\Z)"
_REGEX_LITERALS = re.compile(rf"\\.|\[\^?\]?{_CLASS}", re.DOTALL)
_EBNF_LITERALS = re.compile(rf"\"(?:\\(?:.|\Z)|[^\"\\])*(?:\"|\Z)|\[{_CLASS}|\#[^\n]*", re.DOTALL)
# no two runs of spaces with nothing between: where the rest does not match, each way to divide one would be tried
_REPEAT = re.compile(r"\{\s*(?:(\d+)\s*)?(?:,\s*(?:(\d+)\s*)?)?\}")


def check_grammar(guide: Guide, limits: StructuredOutputConfig) -> None:
    """Raises RequestError that names the guide, its size and the limit, or what of it would not be enforced."""
    text = guide.text
    if guide.type == "regex":
        _check("characters", len(text), limits.max_regex_chars, "guided_max_regex_chars")
        _check_expression(_REGEX_LITERALS.sub("x", text), limits)
        _check_enforced(guide.type, text)
    elif guide.type == "ebnf_grammar":
        _check("bytes", _num_bytes(text), limits.max_grammar_bytes, "guided_max_grammar_bytes")
        _check_expression(_EBNF_LITERALS.sub("x", text), limits)
    elif guide.type in ("json_schema", "structural_tag"):
        _check("bytes", _num_bytes(text), limits.max_schema_bytes, "guided_max_schema_bytes")
        schema = _parse(text, limits, guide.type)
        if guide.type == "structural_tag":
            schema = _with_parsed_schemas(schema, limits)
        _check_schema(schema, limits)
        _check_enforced(guide.type, schema)


def _check_enforced(kind: str, content: object) -> None:
    check = {"regex": lambda text: check_regex(str(text), is_in_json=False), "json_schema": check_schema}
    try:
        check.get(kind, check_tag)(content)
    except UnenforcedError as error:
        raise RequestError(FIELD, f"has {error}") from error


def _check(unit: str, value: int, limit: int, parameter: str) -> None:
    if value > limit:
        shown = value if value < 10**18 else "a number of 18 digits or more"
        raise RequestError(FIELD, f"has {shown} {unit}, accepted: at most {parameter}={limit}")


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _check_expression(text: str, limits: StructuredOutputConfig) -> None:
    """text: without literals and classes, in which brackets and braces mean themselves."""
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    _check("levels of parentheses", deepest, limits.max_depth, "guided_max_depth")
    for match in _REPEAT.finditer(text):
        for digits in match.groups():
            _check("as a number of repetitions", _number(digits or ""), limits.max_repeat, "guided_max_repeat")


def _number(digits: str) -> int:
    return int(digits[:19] or 0)  # no longer: int() refuses thousands of digits, and these are too many anyway


def _parse(text: str, limits: StructuredOutputConfig, kind: str) -> object:
    try:
        parsed: object = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise RequestError(FIELD, f"not a usable {kind}: {error}") from error
    except RecursionError as error:
        raise RequestError(FIELD, f"is nested too deeply, accepted: guided_max_depth={limits.max_depth}") from error
    return parsed


def _with_parsed_schemas(tag: object, limits: StructuredOutputConfig) -> object:
    """The older form of a structural tag, whose schemas may be texts, with schemas that the limits can be seen of."""
    structures = tag.get("structures") if isinstance(tag, dict) else None
    if not isinstance(tag, dict) or not isinstance(structures, list):
        return tag
    parsed = [
        {**part, "schema": _parse(part["schema"], limits, "structural_tag")}
        if isinstance(part, dict) and isinstance(part.get("schema"), str)
        else part
        for part in structures
    ]
    return {**tag, "structures": parsed}


def _refuse_constant(name: str) -> object:
    """NaN as a count is neither too many nor few enough."""
    raise ValueError(f"{name} is no JSON")


def _check_schema(schema: object, limits: StructuredOutputConfig) -> None:
    num_properties = 0
    level, depth = [schema], 0
    while level:
        _check("levels", depth, limits.max_depth, "guided_max_depth")
        below: list[object] = []
        for node in level:
            if isinstance(node, dict):
                num_properties += _check_object(node, limits)
                below += node.values()
            elif isinstance(node, list):
                below += node
            elif isinstance(node, int | float) and abs(node) > _LARGEST:
                raise RequestError(FIELD, "has a number of more than 308 digits, accepted: numbers up to 1e308")
        level, depth = below, depth + 1
    _check("properties", num_properties, limits.max_properties, "guided_max_properties")


def _check_object(node: dict[str, object], limits: StructuredOutputConfig) -> int:
    """Returns how many properties it declares."""
    counts = _COUNTS | _TAG_COUNTS if node.get("type") in ("repeat", "any_text") else _COUNTS
    for name in counts & node.keys():
        value = node[name]
        if isinstance(value, int | float):
            _check(f"as {name}", int(max(0, min(value, 10**18))), limits.max_repeat, "guided_max_repeat")
    for name, literals in (("pattern", _REGEX_LITERALS), ("grammar", _EBNF_LITERALS)):
        if isinstance(expression := node.get(name), str):
            _check_expression(literals.sub("x", expression), limits)
    found = 0
    for name in ("properties", "patternProperties"):
        declared = node.get(name)
        found += len(declared) if isinstance(declared, dict) else 0
    return found
