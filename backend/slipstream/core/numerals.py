"""Numbers that are written as text, in parameters and requests: one grammar, which backend/triton/numerals.h shares.

Python's own int() and float() take more: 1_0 for 10, digits of other scripts, inf and nan. Standard library only.
"""

from __future__ import annotations

import math
import re

_SPACE = " \t\n\r\v\f"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")  # one way to divide digits: no square


def read_whole(text: str) -> int:
    """ASCII digits with an optional sign, and space around them. Raises ValueError."""
    return int(_matched(_WHOLE, text))


def read_decimal(text: str) -> float:
    """A finite decimal number, with an exponent or without, and space around it. Raises ValueError."""
    number = float(_matched(_DECIMAL, text))
    if math.isinf(number):
        raise ValueError(text)
    return number


def is_whole(text: str, least: int, most: int) -> bool:
    """Whether text is ASCII digits and nothing else, for a number from least to most, which has at most 18 digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 18 and least <= int(text) <= most


def _matched(grammar: re.Pattern[str], text: str) -> str:
    bare = text.strip(_SPACE)
    if grammar.fullmatch(bare) is None:
        raise ValueError(text)
    return bare
