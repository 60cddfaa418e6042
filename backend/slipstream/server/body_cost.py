"""What it costs the event loop to read a body of JSON, from a count of its characters. Pure functions.

Bytes say little: 4 MiB of text in one message take 5 ms, 140,000 parts of a message 0.8 s.
"""

from __future__ import annotations

# Measured with json and pydantic, the dearest of each: calls of tools, empty lists, token ids, long integers.
_US_PER_QUOTE, _US_PER_BRACKET, _US_PER_COMMA, _US_PER_DIGIT = 0.9, 0.4, 0.05, 0.02
_DIGITS = b"0123456789"


def reading_us(data: bytes) -> float:
    """An upper bound, up to a factor of two, of the microseconds that this part of a body takes.

    A quotation mark within a text has a backslash before it, so code and prose cost next to nothing.
    """
    num_quotes = data.count(b'"') - data.count(b'\\"')
    num_brackets = data.count(b"{") + data.count(b"[")
    num_digits = len(data) - len(data.translate(None, _DIGITS))
    of_numbers = _US_PER_COMMA * data.count(b",") + _US_PER_DIGIT * num_digits
    return _US_PER_QUOTE * num_quotes + _US_PER_BRACKET * num_brackets + of_numbers
