"""Which regular expressions xgrammar enforces as they are written. Any thread; standard library only.

xgrammar drops anchors in the middle and, in a schema, lookaheads; it reads \\A and \\Z as letters. One pass over the
text, whatever it is: nothing here matches the client's expression.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|(.))", re.S)
_HEX = re.compile(r"[0-9a-fA-F]")
_REPEAT = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_NAMED_GROUP = re.compile(r"\(\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_CLASSES = frozenset("dDwWsS")
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7, "e": 27, "0": 0}
_FAR = {"=": "lookahead", "!": "lookahead", "<=": "lookbehind", "<!": "lookbehind"}
_OTHER_CHARACTERS = "other characters than quotation marks, backslashes and control characters"
_ASCII = "\\uhhhh for characters outside ASCII"
_LITERAL = re.compile(r"[A-Za-z0-9_\-/:@ ]|\\[^A-Za-z0-9]")


class UnenforcedError(ValueError):
    """str(): the construct, its place and what is accepted, to stand behind "has".

    schema, keyword: of the part of a JSON schema that has it.
    """

    def __init__(self, told: str, schema: dict[str, object] | None = None, keyword: str = "") -> None:
        super().__init__(told)
        self.schema, self.keyword = schema, keyword


@dataclass
class _Group:
    """begins_first: nothing is matched before it. has_text, has_end: of the alternative that is read."""

    begins_first: bool
    has_text: bool = False
    has_end: bool = False
    has_anchor: bool = False
    may_end: bool = False  # an alternative before this one ended with $


@dataclass
class _Scan:
    text: str
    is_in_json: bool
    position: int = 0
    groups: list[_Group] = field(default_factory=lambda: [_Group(True)])
    is_wide: bool = False  # has a class, or ., that holds what JSON escapes
    last: str = ""  # "", "atom", "anchored" (a group with an anchor), "repeat" or "lazy"

    def refuse(self, what: str, accepted: str) -> UnenforcedError:
        return UnenforcedError(f"{what} at character {self.position}, which cannot be enforced, accepted: {accepted}")


def check_regex(text: str, is_in_json: bool) -> None:
    """is_in_json: it describes a JSON string, whose quotation marks, backslashes and control characters are escaped.

    Raises UnenforcedError. What xgrammar itself refuses may pass.
    """
    scan = _Scan(text, is_in_json)
    if is_in_json and text.startswith("(?i)"):
        scan.position = 4
    while scan.position < len(text):
        character, group = text[scan.position], scan.groups[-1]
        if character == "^":
            if group.has_text or not group.begins_first:
                raise scan.refuse("^", "^ where nothing is matched before it")
            group.has_anchor, scan.last = True, ""
            scan.position += 1
        elif character == "$":
            group.has_end = group.has_anchor = True
            scan.last = ""
            scan.position += 1
        elif character == "|":
            group.may_end |= group.has_end
            group.has_text = group.has_end = False
            scan.last = ""
            scan.position += 1
        elif character == ")" and len(scan.groups) > 1:
            _close(scan)
        else:
            if group.has_end:
                raise scan.refuse("text behind $", "$ where nothing is matched behind it")
            _read_item(scan, character)
    if is_in_json and scan.is_wide and "|" in text and not text.isascii():  # alternatives become one class
        scan.position = text.index("|")
        raise scan.refuse("| in a pattern with non-ASCII and a class of what JSON escapes", _ASCII)


def literal_prefix(pattern: str) -> str:
    """What every text begins with that the pattern matches; "" if that is not plain to see."""
    if not pattern.startswith("^") or "|" in pattern:
        return ""
    pieces: list[str] = []
    position = 1
    while match := _LITERAL.match(pattern, position):
        pieces.append(match.group()[-1])
        position = match.end()
    if pieces and pattern[position : position + 1] in ("*", "?", "{", "+"):
        pieces.pop()
    return "".join(pieces)


def _close(scan: _Scan) -> None:
    group, outer = scan.groups.pop(), scan.groups[-1]
    outer.has_text = True
    outer.has_end |= group.has_end or group.may_end
    outer.has_anchor |= group.has_anchor
    scan.last = "anchored" if group.has_anchor else "atom"
    scan.position += 1
    if group.has_anchor and _REPEAT.match(scan.text, scan.position):
        raise scan.refuse("the repetition of a group with ^ or $", "a group without them")


def _read_item(scan: _Scan, character: str) -> None:
    """An atom, the beginning of a group, or a repetition."""
    if character in "*+?{":
        _read_repeat(scan)
        return
    group = scan.groups[-1]
    if character == "(":
        _open(scan)
        return
    group.has_text, scan.last = True, "atom"
    if character == "[":
        _read_class(scan)
    elif character == "\\":
        begin, number = scan.position, _read_escape(scan, is_in_class=False)
        scan.is_wide |= number is None and scan.text[begin + 1] not in "dw"
        _check_literal(scan, begin, number)
    else:
        _check_literal(scan, scan.position, ord(character))
        scan.is_wide |= character == "."
        scan.position += 1


def _read_repeat(scan: _Scan) -> None:
    match = _REPEAT.match(scan.text, scan.position)
    if match is None:
        raise scan.refuse("{", "{n}, {n,} and {n,m}, or \\{")
    if scan.last == "repeat" and match.group() == "?":
        scan.last = "lazy"
    elif scan.last in ("repeat", "lazy"):
        raise scan.refuse("two repetitions in a row", "one, or a group around the first")
    elif not scan.last:
        raise scan.refuse("a repetition of nothing", "one behind what it repeats")
    else:
        scan.last = "repeat"
    scan.position = match.end()


def _open(scan: _Scan) -> None:
    text, group = scan.text, scan.groups[-1]
    end = scan.position + 1
    if text.startswith("?", end):
        named = _NAMED_GROUP.match(text, scan.position)
        if text.startswith("?:", end):
            end += 2
        elif named is not None:
            end = named.end()
        else:
            mark = text[end + 1 : end + 3]
            what = _FAR.get(mark, _FAR.get(mark[:1], f"(?{mark[:1]}"))
            raise scan.refuse(what, "groups (…), (?:…) and (?<name>…)")
    scan.groups.append(_Group(group.begins_first and not group.has_text))
    scan.position, scan.last = end, ""


def _read_escape(scan: _Scan, is_in_class: bool) -> int | None:
    """Returns the character's number; None for a class such as \\d."""
    match = _ESCAPE.match(scan.text, scan.position)
    if match is None:
        raise scan.refuse("a backslash", "one with a character behind it, or \\\\")
    digits, name = match.group(1) or match.group(2) or match.group(3), match.group(4)
    if digits is not None:
        if match.group(1) and not scan.is_in_json and _HEX.match(scan.text, match.end()):  # read as one more digit
            raise scan.refuse(match.group(), f"\\u00{digits}")
        scan.position = match.end()
        return int(digits, 16)
    following = scan.text[match.end() : match.end() + 1]
    is_letter = name.isascii() and name.isalnum()
    is_known = name in _CLASSES or (name in _CONTROLS and not (name == "0" and following.isdigit()))
    if name == "c" and following.isascii() and following.isalpha():
        scan.position = match.end() + 1
        return ord(following) % 32
    if name == "b" and is_in_class:
        is_known = True
    if is_letter and not is_known:
        accepted = "\\d \\D \\w \\W \\s \\S, \\n \\t \\r \\f \\v, \\xhh, \\uhhhh and escaped punctuation"
        raise scan.refuse(f"\\{name}", f"{accepted}; the whole text is matched without anchors")
    scan.position = match.end()
    if name in _CLASSES:
        return None
    return 8 if name == "b" else _CONTROLS.get(name, ord(name))


def _read_class(scan: _Scan) -> None:
    """[…]: of plain characters, escapes and ranges."""
    text, begin = scan.text, scan.position
    is_negated = text.startswith("^", begin + 1)
    scan.position += 2 if is_negated else 1
    if text.startswith("]", scan.position):
        raise scan.refuse("an empty class", "\\] for the bracket")
    parts: list[int | str] = []
    while scan.position < len(text) and text[scan.position] != "]":
        first = scan.position
        number: int | None = ord(text[first])
        if text[first] == "\\":
            number = _read_escape(scan, is_in_class=True)
        else:
            scan.position += 1
        if number == ord("^") and first == begin + 1 and not scan.is_in_json:  # read as [^
            scan.position = begin
            raise scan.refuse("a class that begins with an escaped ^", "^ behind another character, as [a^]")
        parts.append(text[first : scan.position] if number is None or text[first] == "-" else number)
    end, scan.position = scan.position + 1, begin
    if scan.is_in_json:
        _check_json_class(scan, parts, is_negated, text[begin:end])
    scan.position = end


def _check_json_class(scan: _Scan, parts: list[int | str], is_negated: bool, text: str) -> None:
    """parts: of characters their numbers, of classes and - their text.

    xgrammar takes out what JSON escapes, except from a class of nothing else and from one with plain non-ASCII.
    """
    written = [part for part in parts if part != "-"]
    if not is_negated and written and all(_needs_escape(part) for part in written):
        raise scan.refuse("a class of characters that JSON escapes", _OTHER_CHARACTERS)
    ranges = [(low, high) for low, dash, high in zip(parts, parts[1:], parts[2:], strict=False) if dash == "-"]
    wide = any(isinstance(low, int) and isinstance(high, int) and _holds_escaped(low, high) for low, high in ranges)
    others = any(part not in ("-", "\\d", "\\w") for part in parts if isinstance(part, str))
    is_wide = is_negated or wide or others or any(_needs_escape(part) for part in parts)
    scan.is_wide |= is_wide
    if is_wide and not text.isascii():
        raise scan.refuse("a class that mixes non-ASCII with what JSON escapes", _ASCII)


def _holds_escaped(low: int, high: int) -> bool:
    return low < 32 or low <= 34 <= high or low <= 92 <= high


def _check_literal(scan: _Scan, begin: int, number: int | None) -> None:
    if scan.is_in_json and _needs_escape(number):
        scan.position = begin
        raise scan.refuse("a character that JSON escapes", _OTHER_CHARACTERS)


def _needs_escape(part: int | str | None) -> bool:
    """Within a JSON string. xgrammar writes it as it is, which ends or breaks the string."""
    return isinstance(part, int) and (part < 32 or part in (34, 92))
