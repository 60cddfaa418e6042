"""JSON schemas and patterns that xgrammar enforces, and those of which it drops a part; with answers to each."""

from __future__ import annotations

import enum
import uuid
from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import AnyUrl, BaseModel, ConfigDict, Field

INT, TEXT = {"type": "integer"}, {"type": "string"}


A_IS_INT = {"$defs": {"A": INT}}


def having(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, INT), "required": list(names)}


def under(name: str, schema: object, **more: object) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False, **more}


# schema, JSON pointer of what is refused, an answer that breaks the schema and that xgrammar accepts
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"allOf": [having("a"), having("b")]}, "/allOf", "1"),
    ({**having("kind"), "anyOf": [{**having("b")}, {**having("c")}]}, "/properties", '{"b": 2}'),
    ({"type": "integer", "anyOf": [INT, TEXT]}, "/type", '"a"'),
    ({"anyOf": [INT, TEXT], "oneOf": [INT]}, "/oneOf", '"a"'),
    ({"anyOf": [INT], "minimum": 3}, "/minimum", "1"),
    ({"allOf": [INT], "minimum": 3}, "/minimum", "1"),
    ({"type": "array", "enum": [[1], [2]], "minItems": 3}, "/minItems", "[1]"),
    ({"enum": [1, 5], "minimum": 2}, "/minimum", "1"),
    ({"type": "string", "const": "bbb", "maxLength": 1}, "/maxLength", '"bbb"'),
    ({"type": "string", "enum": ["a", 1]}, "/type", "1"),
    ({"type": "integer", "enum": [True]}, "/type", "true"),
    ({"const": 3, "enum": [1, 2]}, "/enum", "3"),
    ({"const": 2**64 + 1}, "/const", "1.8446744073709552e+19"),
    (under("a", {"enum": [{"b": [-(2**63) - 1]}]}), "/properties/a/enum", '{"a": {"b":[-9.2233720368547758e+18]}}'),
    ({"type": "array", "items": INT, "uniqueItems": True}, "/uniqueItems", "[1, 2, 1]"),
    ({"type": "array", "items": INT, "contains": {"const": 2}}, "/contains", "[1]"),
    ({"$ref": "#/$defs/A", "minimum": 2, "maximum": 3, "$defs": {"A": INT}}, "/minimum", "7"),
    ({"$ref": "#/$defs/A", "type": "string", "$defs": {"A": INT}}, "/type", "1"),
    (under("a/~", {"$ref": "#/$defs/A", "enum": [1]}, **A_IS_INT), "/properties/a~1~0/enum", '{"a/~": 2}'),
    ({"$ref": "other.json"}, "/$ref", "1"),
    ({"$ref": "#A", "$defs": {"A": {"$anchor": "A", **INT}}}, "/$ref", '"a"'),
    ({"$ref": "#/x-held/A", "x-held": {"A": {**INT, "not": {"const": 1}}}}, "/$ref", "1"),
    ({"$dynamicRef": "#A", "$defs": {"A": INT}}, "/$dynamicRef", '"a"'),
    ({"type": "integer", "not": {"const": 3}}, "/not", "3"),
    ({"type": "integer", "if": {"const": 3}, "then": False}, "/if", "3"),
    ({"type": "integer", "multipleOf": 5, "minimum": 2}, "/multipleOf", "7"),
    ({"type": "integer", "multipleOf": 1025}, "/multipleOf", "5"),
    ({"type": "number", "multipleOf": 5}, "/multipleOf", "7"),
    ({"type": ["number", "string"], "multipleOf": 5}, "/multipleOf", "7"),
    ({"minimum": 5}, "/minimum", "4"),
    ({"minLength": 2}, "/minLength", '"a"'),
    ({"format": "date"}, "/format", '"x"'),
    ({"minItems": 2}, "/minItems", "[1]"),
    ({"required": ["a"]}, "/required", "{}"),
    ({"patternProperties": {"^a$": INT}}, "/patternProperties", '{"a": "x"}'),
    ({"propertyNames": {"enum": ["a"]}}, "/propertyNames", '{"b": 1}'),
    ({"type": []}, "/type", "1"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "/maxLength", '"aaaa"'),
    ({"type": "string", "pattern": "^a+$", "minLength": 2}, "/minLength", '"a"'),
    ({"type": "string", "pattern": "^a+$", "format": "date"}, "/pattern", '"2020-01-01"'),
    ({"type": "string", "format": "date", "minLength": 20}, "/minLength", '"2020-01-01"'),
    ({"type": "string", "format": "uri-reference", "minLength": 1}, "/minLength", '""'),
    (under("a", INT, required=["a", "z"]), "/required", '{"a": 1}'),
    ({**having("a"), "required": ["z"], "additionalProperties": True}, "/required", '{"a": 1}'),
    ({**having("a", "b"), "required": [], "dependentRequired": {"a": ["b"]}}, "/dependentRequired", '{"a": 1}'),
    ({"type": "object", "patternProperties": {"^a.*$": INT, ".*b$": TEXT}}, "/patternProperties", '{"ab": "x"}'),
    ({"properties": {"aa": TEXT}, "patternProperties": {"^a+$": INT}}, "/patternProperties", '{"aa": "x"}'),
    ({"type": "object", "properties": {"a": TEXT}, "propertyNames": {"enum": ["b"]}}, "/propertyNames", '{"a": "x"}'),
    ({"propertyNames": {"maxLength": 3}, "additionalProperties": False}, "/additionalProperties", '{"a": "x"}'),
    ({"type": "object", "additionalProperties": INT, "minProperties": 2}, "/minProperties", '{"a": 1, "a": 2}'),
    ({"type": "object", "patternProperties": {"^a$": INT}, "minProperties": 2}, "/minProperties", '{"a": 1, "a": 2}'),
    ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "/propertyNames/not", '{"a": "x"}'),
    ({"type": "object", "patternProperties": {"^(?!n)[a-z]$": INT}}, "/patternProperties/^(?!n)[a-z]$", '{"n": 1}'),
    ({"type": "string", "minLenght": 3}, "/minLenght", '"a"'),
    (under("a", {"anyOf": [TEXT, {"items": {"minimum": 1}}]}), "/properties/a/anyOf/1/items/minimum", '{"a": [0]}'),
]  # fmt: skip

# patterns of a schema, with an answer that breaks them, or JSON itself, and that xgrammar accepts
REFUSED_PATTERNS = [
    ("^(?!n)[a-z]$", '"n"'),
    ("a(?=b)", '"a"'),
    (r"\A[a-z]{2}\Z", '"AccZ"'),
    (r"[a-z]\z", '"az"'),
    ("a^b", '"ab"'),
    ("(a$)b", '"ab"'),
    ("(?:a|b$)c", '"bc"'),
    (r"a\"b", '"a"b"'),
    (r"\\", '"\\"'),
    (r"\n", '"\n"'),
    (r"[\x22]", '"""'),
    ("[^é]", '"""'),
    ("[ -é]", '"\\"'),
    ("(é|[^a])", '"""'),
    (r"é|\S", '"""'),
]

# expressions, with a text that does not match and that xgrammar accepts; "" for those that it refuses itself
REFUSED_REGEXES = [
    (r"\A[a-z]{2}\Z", "AccZ"),
    (r"[a-z]{2}\z", "aaz"),
    (r"\Gab", "Gab"),
    (r"[\B]", "B"),
    ("a^b", "ab"),
    ("a(^b)", "ab"),
    ("a$b", "ab"),
    ("((a$))b", "ab"),
    ("(^a){2}", "aa"),
    (r"[\^a]", "b"),
    (r"[\u005ea]", "b"),
    (r"\x41b", "\u041b"),
    (r"[\x5ca]", "\u05ca"),
    (r"\bab\b", ""),
    ("(?=a)a", ""),
    ("(?<!a)b", ""),
    (r"(a)\1", ""),
    ("(?i)a", ""),
    ("a{,2}", ""),
    ("a++", ""),
]

# schema, an answer that keeps to it, one that breaks it
ACCEPTED: list[tuple[dict[str, Any], str, str]] = [
    ({"allOf": [INT], "title": "t", "description": "d", "default": 3}, "1", '"a"'),
    ({"allOf": [{"$ref": "#/definitions/A"}], "definitions": {"A": INT}}, "1", '"a"'),
    (under("a", {"$ref": "#/$defs/A", "description": "d", "default": 1}, **A_IS_INT), '{"a": 1}', '{"a": "x"}'),
    ({"anyOf": [INT, {"type": "null"}], "default": None, "title": "t", "x-order": 1}, "null", '"a"'),
    ({"type": "object", "oneOf": [having("a"), having("b")], "discriminator": {}}, '{"b": 1}', "{}"),
    ({"type": "number", "anyOf": [{"const": 1}, {"$ref": "#/$defs/A"}], "$defs": {"A": INT}}, "1", "1.5"),
    ({"type": "string", "enum": ["a", "b"]}, '"a"', '"c"'),
    ({"type": ["string", "null"], "enum": ["a", None]}, "null", '"b"'),
    ({"type": "number", "enum": [1, 2.5]}, "2.5", "3"),
    ({"type": "string", "const": "a", "enum": ["a"]}, '"a"', '"b"'),
    ({"const": {"x": [1]}}, '{"x":[1]}', '{"x":[2]}'),
    ({"type": "integer", "minimum": 2, "exclusiveMinimum": 3, "maximum": 9}, "4", "3"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5", "1.0"),
    ({"type": "integer", "multipleOf": 7}, "49", "50"),
    ({"type": "integer", "multipleOf": 1, "minimum": 3}, "3", "2"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, '"ab"', '"abcd"'),
    ({"type": ["string", "integer"], "maxLength": 2, "minimum": 3}, "3", '"aaa"'),
    ({"type": "string", "pattern": r"^[\w.-]+@\w+$"}, '"a.b@c"', '"a b@c"'),
    ({"type": "string", "pattern": "^(größe|länge)$"}, '"größe"', '"g"'),
    ({"type": "string", "pattern": r"^[^\u00e9]$"}, '"a"', '"é"'),
    ({"type": "string", "pattern": "^[ -~]{2}$", "format": "made-up"}, '"ab"', '"""'),
    ({"type": "string", "format": "date"}, '"2020-01-01"', '"x"'),
    ({"type": "string", "format": "uri", "minLength": 1}, '"http://a"', '""'),
    ({"type": "array", "items": INT, "minItems": 2, "maxItems": 3, "uniqueItems": False}, "[1, 2]", "[1]"),
    ({"type": "array", "prefixItems": [INT, TEXT], "items": False}, '[1, "a"]', '[1, "a", 2]'),
    ({"prefixItems": [INT], "unevaluatedItems": TEXT}, '[1, "a"]', "[1, 1]"),
    ({"type": "object", "additionalProperties": INT, "minProperties": 1}, '{"a": 1, "b": 2}', "{}"),
    ({**having("a"), "additionalProperties": INT, "minProperties": 2}, '{"a": 1, "b": 2}', '{"a": 1}'),
    ({"properties": {"a": INT, "b": INT, "c": INT}, "minProperties": 2}, '{"a": 1, "c": 2}', '{"b": 1}'),
    ({**having("a"), "additionalProperties": TEXT, "maxProperties": 2}, '{"a": 1, "b": "x"}', '{"a": 1, "b": 2}'),
    ({**having("a"), "unevaluatedProperties": False}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"type": "object", "patternProperties": {"^a+$": INT}, "minProperties": 1}, '{"aa": 1}', '{"b": 1}'),
    ({**having("b"), "patternProperties": {"^x-[a-z]$": INT}}, '{"b": 1, "x-a": 1}', '{"b": 1, "x-a": "x"}'),
    ({"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": INT}, '{"aa": 1}', '{"b": 1}'),
    ({"properties": {"n": INT, "c": {"items": {"$ref": "#"}}}}, '{"n": 1, "c": [{"n": 2}]}', '{"n": 1, "c": [1]}'),
    ({"properties": {"not": {"minimum": 1, **INT}, "pattern": {}}, "required": ["not"]}, '{"not": 1}', '{"not": 0}'),
]  # fmt: skip


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Leaf(BaseModel):
    """A docstring becomes a description."""

    kind: Literal["leaf"]
    weight: int = Field(3, ge=1, le=9, description="in grams", examples=[1])


class Branch(BaseModel):
    kind: Literal["branch"]
    parts: list[Branch] = []
    leaf: Leaf | None = Field(None, description="beside anyOf")
    other: Leaf = Field(Leaf(kind="leaf"), description="beside $ref")


class Everything(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: float = 1.0
    name: str | None = None
    choice: Literal["x", "y"]
    color: Color = Field(Color.RED, title="Color")
    counts: dict[str, int]
    pair: tuple[int, str]
    anything: Any
    mapping: dict[str, Any]
    items: Annotated[list[Leaf], Field(min_length=1, max_length=3)]
    lower: Annotated[str, Field(pattern="^[a-z]+$")]
    short: Annotated[str, Field(min_length=1, max_length=9)]
    share: Annotated[float, Field(gt=0, lt=1)]
    when: datetime
    day: date
    key: uuid.UUID
    url: AnyUrl
    data: bytes
    by_color: dict[Color, int]
    by_name: dict[Annotated[str, Field(pattern="^a+$")], int]
    either: Leaf | Branch = Field(discriminator="kind")


MODELS: list[type[BaseModel]] = [Leaf, Branch, Everything]
