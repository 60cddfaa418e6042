"""Which keywords of JSON Schema xgrammar enforces, as data, and the check that a schema has no others.

What xgrammar would drop without a word is refused with its place. Any thread; standard library only. Linear in the
size of the schema, and without recursion: the depth is limited before (core/grammar_limits.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from slipstream.core.regex_syntax import UnenforcedError, check_regex, literal_prefix

ANNOTATIONS = frozenset(
    (
        *("title", "description", "markdownDescription", "default", "example", "examples", "deprecated", "readOnly"),
        *("writeOnly", "$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "contentEncoding"),
        *("contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml", "enumNames"),
        *("enumDescriptions", "propertyOrdering"),
    )
)
DEFINITIONS = frozenset(("$defs", "definitions"))

# These decide alone: xgrammar reads the first of them and nothing else.
SELECTORS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# keyword -> the types that it restricts. It is enforced where `type` is given, or where xgrammar infers the type.
TYPED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(_BOUNDS, ("integer", "number")),
    "multipleOf": ("integer",),
    **dict.fromkeys(("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("properties", "additionalProperties", "unevaluatedProperties"), ("object",)),
    **dict.fromkeys(("patternProperties", "propertyNames", "required", "minProperties", "maxProperties"), ("object",)),
}
INFERRED = {
    **dict.fromkeys(("properties", "additionalProperties", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "unevaluatedItems"), "array"),
}

# format -> the shortest text that it has. Others are annotations.
FORMATS = {
    **dict.fromkeys(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"), 1),
    **dict.fromkeys(("json-pointer", "uri-reference", "uri-template"), 0),
    "relative-json-pointer": 1,
}
_LARGEST_MULTIPLE = 1024

# keyword -> what is accepted in its place. A value that restricts nothing passes.
REFUSED = {
    **dict.fromkeys(("not", "if", "then", "else"), "anyOf with a schema for each case"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "anyOf with a schema for each case"),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "items, prefixItems, minItems and maxItems"),
    "uniqueItems": "uniqueItems: false, or items with minItems and maxItems",
    "additionalItems": "prefixItems with items",
    "nullable": 'a list of types with "null", or anyOf with {"type": "null"}',
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), '"$ref": "#/$defs/…"'),
}
_NEUTRAL = {"uniqueItems": False, "nullable": False}

_MAPS = frozenset(("properties", "patternProperties")) | DEFINITIONS
_LISTS = frozenset(("prefixItems", "anyOf", "oneOf", "allOf"))
_SINGLE = frozenset(("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames"))
_JSON_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)
_OTHER_PROPERTIES = ("additionalProperties", "unevaluatedProperties")
_MAX_SHOWN, _MAX_NAMED = 200, 60  # characters of a pointer, of a keyword

Schema = dict[str, object]


@dataclass(frozen=True)
class _Place:
    """A schema. above, key: where it stands, None for the root. is_name: it describes the name of a property."""

    schema: Schema
    above: _Place | None = None
    key: str = ""
    is_name: bool = False

    def error(self, keyword: str, reason: str, accepted: str) -> UnenforcedError:
        shown = escaped(keyword if len(keyword) <= _MAX_NAMED else f"{keyword[:_MAX_NAMED]}…")
        told = f"{shown} at {self.pointer(shown)}, which cannot be enforced: {reason}, accepted: {accepted}"
        return UnenforcedError(told, self.schema, keyword)

    def pointer(self, keyword: str) -> str:
        """RFC 6901; keyword: a pointer within this schema, without the first slash."""
        keys, place = [keyword], self
        while place.above is not None:
            keys.append(place.key)
            place = place.above
        text = "/" + "/".join(reversed(keys))
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def check_schema(schema: object) -> None:
    """schema: as parsed from JSON. What is no schema passes, as xgrammar refuses it by itself.

    Raises UnenforcedError, which names keyword, JSON pointer and what is accepted.
    """
    for error in faults(schema):
        raise error


def faults(schema: object) -> Iterator[UnenforcedError]:
    """What check_schema raises, one after the other, for callers that take out what each names before the next.

    What refers to something that was taken out is found in another walk alone.
    """
    if not isinstance(schema, dict):
        return
    level, places = [_Place(schema)], []
    while level:
        places += level
        level = [below for place in level for below in _below(place)]
    known = {id(place.schema) for place in places}
    for place in places:
        while (error := _fault(place, schema, known)) is not None:
            yield error


def _fault(place: _Place, root: Schema, known: set[int]) -> UnenforcedError | None:
    try:
        _check_place(place, root, known)
    except UnenforcedError as error:
        return error
    return None


def _below(place: _Place) -> Iterator[_Place]:
    for keyword, value in place.schema.items():
        parts: list[tuple[str, object]] = []
        if keyword in _MAPS and isinstance(value, dict):
            parts = [(f"{keyword}/{escaped(name)}", part) for name, part in value.items()]
        elif keyword in _LISTS and isinstance(value, list):
            parts = [(f"{keyword}/{index}", part) for index, part in enumerate(value)]
        elif keyword in _SINGLE:
            parts = [(keyword, value)]
        for key, part in parts:
            if isinstance(part, dict):
                yield _Place(part, place, key, keyword == "propertyNames")


def escaped(key: str) -> str:
    """A part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _check_place(place: _Place, root: Schema, known: set[int]) -> None:
    schema = place.schema
    for keyword in schema:
        _check_keyword(place, keyword)
    _check_numbers(place)
    selectors = [keyword for keyword in SELECTORS if keyword in schema]
    if selectors:
        _check_selector(place, selectors, root, known)
        return
    types = types_of(schema)
    if place.is_name and not types:
        types = frozenset(("string",))
    restricting = [keyword for keyword in schema if keyword in TYPED and not _is_annotation(schema, keyword)]
    if schema.get("type") == []:
        raise place.error("type", "an empty list of types is not read", "a type, or a list of types")
    if not types and restricting:
        keyword = restricting[0]
        wanted = " or ".join(json.dumps(name) for name in TYPED[keyword])
        raise place.error(keyword, "it has no effect without a type", f'{keyword} beside "type": {wanted}')
    if "string" in types:
        _check_string(place)
    if "multipleOf" in schema and types & {"integer", "number"}:
        _check_multiple(place, types)
    if "object" in types:
        _check_object(place)


def _check_keyword(place: _Place, keyword: str) -> None:
    if keyword in REFUSED:
        if keyword in _NEUTRAL and place.schema[keyword] is _NEUTRAL[keyword]:
            return
        raise place.error(keyword, "the grammar would not hold the answer to it", REFUSED[keyword])
    is_known = keyword == "type" or keyword in TYPED or keyword in SELECTORS or keyword in DEFINITIONS
    if not is_known and keyword not in ANNOTATIONS and not keyword.startswith("x-"):
        raise place.error(keyword, "it is no keyword that is known", "JSON Schema's keywords, and names with x-")


def _check_numbers(place: _Place) -> None:
    """xgrammar holds other integers in doubles: a const of 2**64 + 1 is written as 1.8446744073709552e+19."""
    bounds = _BOUNDS if "integer" in types_of(place.schema) else ()
    for keyword in ("const", "enum", *bounds):
        if keyword in place.schema and _has_large_integer(place.schema[keyword]):
            accepted = "integers from -9223372036854775808 to 9223372036854775807"
            raise place.error(keyword, "it has an integer of more than 64 bits", accepted)


def _has_large_integer(value: object) -> bool:
    if isinstance(value, int):
        return not -(1 << 63) <= value < 1 << 63
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_large_integer, parts))


def _is_annotation(schema: Schema, keyword: str) -> bool:
    value = schema[keyword]
    return keyword == "format" and not (isinstance(value, str) and value in FORMATS)


def types_of(schema: Schema) -> frozenset[str]:
    """What `type` says, or what xgrammar infers; empty: any."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    return frozenset(INFERRED[keyword] for keyword in schema if keyword in INFERRED)


def _check_selector(place: _Place, selectors: list[str], root: Schema, known: set[int]) -> None:
    schema, first = place.schema, selectors[0]
    is_const_of_enum = selectors == ["const", "enum"] and _is_among(schema["const"], schema["enum"])
    for keyword in schema:
        is_beside = keyword in TYPED and not _is_annotation(schema, keyword)
        is_beside |= keyword in selectors[1:] and not is_const_of_enum
        if is_beside or (keyword == "type" and first == "$ref"):
            accepted = f"{first} with annotations alone, and {keyword} within what it refers to or holds"
            if first in ("const", "enum"):
                accepted = f"{first} with annotations and type alone"
            raise place.error(keyword, f"beside {first} it is not read", accepted)
    if first == "$ref":
        _check_reference(place, root, known)
    elif first == "allOf" and isinstance(members := schema["allOf"], list) and len(members) != 1:
        raise place.error("allOf", f"it has {len(members)} schemas", "one schema, as all of them merged into it")
    if first != "$ref" and "type" in schema:
        _check_type_beside(place, first, root)


def _check_reference(place: _Place, root: Schema, known: set[int]) -> None:
    target = _resolve(place.schema["$ref"], root)
    if not isinstance(target, bool) and id(target) not in known:
        raise place.error("$ref", "it names no schema of this document", '"#", or "#/$defs/name" of a schema there')


def _resolve(reference: object, root: Schema) -> object:
    """None for what is not there. xgrammar reads neither ~0, ~1 nor % in it, and walks objects alone."""
    node: object = root
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    for key in reference.split("/")[1:]:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _check_type_beside(place: _Place, first: str, root: Schema) -> None:
    """`type` is not read there, but all that is chosen from may be of it anyway."""
    types, value = types_of(place.schema), place.schema[first]
    if first == "const":
        is_held = _has_type(value, types)
    elif first == "enum":
        is_held = isinstance(value, list) and all(_has_type(member, types) for member in value)
    else:
        is_held = isinstance(value, list) and all(_is_within(part, types, root) for part in value)
    if not is_held:
        raise place.error("type", f"beside {first} it is not read", f"type only where all of {first} is of it")


def _is_within(schema: object, types: frozenset[str], root: Schema) -> bool:
    if isinstance(schema, dict) and "$ref" in schema:
        schema = _resolve(schema["$ref"], root)
    elif isinstance(schema, dict) and "const" in schema:
        return _has_type(schema["const"], types)
    elif isinstance(schema, dict) and isinstance(values := schema.get("enum"), list):
        return all(_has_type(value, types) for value in values)
    if not isinstance(schema, dict) or any(keyword in schema for keyword in SELECTORS if keyword != "enum"):
        return False
    found = types_of(schema)
    return bool(found) and all(name in types or (name == "integer" and "number" in types) for name in found)


def _has_type(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(type(value) is kind and not types.isdisjoint(names) for kind, names in _JSON_TYPES)


def _is_among(value: object, values: object) -> bool:
    text = json.dumps(value, sort_keys=True)
    return isinstance(values, list) and any(json.dumps(one, sort_keys=True) == text for one in values)


def _check_string(place: _Place) -> None:
    schema = place.schema
    pattern, form = schema.get("pattern"), schema.get("format")
    has_form = "format" in schema and not _is_annotation(schema, "format")
    if has_form and "pattern" in schema:
        raise place.error("pattern", "beside this format it is not read", f"pattern, or format {form}")
    if has_form or "pattern" in schema:
        beside, shortest = ("pattern", 0) if "pattern" in schema else (f"format {form}", FORMATS[str(form)])
        for keyword in ("maxLength", "minLength"):
            value = schema.get(keyword, 0)
            if keyword in schema and not (keyword == "minLength" and isinstance(value, int) and value <= shortest):
                accepted = f"{beside} alone, or minLength and maxLength without it; a pattern may end with {{m,n}}"
                raise place.error(keyword, f"beside {beside} it is not read", accepted)
    if isinstance(pattern, str):
        _check_pattern(place, "pattern", pattern)


def _check_pattern(place: _Place, keyword: str, pattern: str) -> None:
    try:
        check_regex(pattern, is_in_json=True)
    except UnenforcedError as error:
        name = keyword.partition("/")[0]
        raise UnenforcedError(f"{name} at {place.pointer(keyword)} with {error}", place.schema, name) from error


def _check_multiple(place: _Place, types: frozenset[str]) -> None:
    value = place.schema["multipleOf"]
    if value == 1 and "number" not in types:
        return
    if "number" in types:
        raise place.error("multipleOf", "it is read for integers alone", '"type": "integer"')
    if not (isinstance(value, int | float) and 1 <= value <= _LARGEST_MULTIPLE and value == int(value)):
        raise place.error("multipleOf", "it is not read", f"a whole number from 1 to {_LARGEST_MULTIPLE}")
    for keyword in _BOUNDS:
        if keyword in place.schema:
            raise place.error("multipleOf", f"beside {keyword} it is not read", "one of them, or an enum")


def _check_object(place: _Place) -> None:
    schema = place.schema
    properties, required = schema.get("properties"), schema.get("required")
    names = properties if isinstance(properties, dict) else {}
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in names:
            shown = json.dumps(name[:60])
            raise place.error("required", f"{shown} is not among the properties", f"properties that have {shown}")
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        for pattern in patterns:
            _check_pattern(place, f"patternProperties/{escaped(pattern)}", pattern)
        _check_overlap(place, patterns, names)
    if "minProperties" in schema:
        _check_least(place, names)
    if "propertyNames" in schema:
        for keyword in ("properties", "patternProperties"):
            if schema.get(keyword):
                raise place.error("propertyNames", f"beside {keyword} it is not read", "one of them")
        for keyword in _OTHER_PROPERTIES:
            if schema.get(keyword) is False:
                raise place.error(keyword, "beside propertyNames it is not read", "true, or a schema of the values")


def _check_least(place: _Place, names: Schema) -> None:
    """Names that `properties` does not have may be repeated in one object, and then count as one."""
    schema, required = place.schema, place.schema.get("required")
    is_open = "patternProperties" in schema or "propertyNames" in schema
    is_open |= any(schema.get(keyword, False) is not False for keyword in _OTHER_PROPERTIES)
    always = (
        {name for name in required if isinstance(name, str) and name in names} if isinstance(required, list) else ()
    )
    least = schema["minProperties"]
    if is_open and isinstance(least, int | float) and least > len(always) + 1:
        accepted = f"at most {len(always) + 1}, which is one more than are required, or properties alone"
        raise place.error("minProperties", "a name may come twice in the answer", accepted)


def _check_overlap(place: _Place, patterns: Schema, names: Schema) -> None:
    """A name that two of them describe is held to one. A text that begins with another sorts right behind it."""
    begins = sorted([(literal_prefix(pattern), False) for pattern in patterns] + [(name, True) for name in names])
    for (first, is_name), (second, _) in pairwise(begins):
        if not is_name and second.startswith(first):
            accepted = "patterns that begin with ^ and a text of their own, which no other name begins with, as ^x-.*$"
            raise place.error("patternProperties", "a name may be described twice, and is held to one", accepted)
