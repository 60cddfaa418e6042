"""Divides the texts of a check among calls of the safety model, so that none takes long. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_CHECK_CHARS = 8000  # of one call: a second of a CPU, in which the checks of other requests wait
_CHECK_ROWS = 32  # of one call
_OVERLAP_CHARS = 1000  # of the parts of a long text: a sentence up to this long is whole in one of them


def in_calls(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts of each call, of at most MAX_CHECK_CHARS in all: a long text in parts that overlap."""
    rows: list[str] = []
    num_chars = 0
    for text in texts:
        for start in range(0, max(1, len(text) - _OVERLAP_CHARS), MAX_CHECK_CHARS - _OVERLAP_CHARS):
            part = text[start : start + MAX_CHECK_CHARS]
            if rows and (len(rows) == _CHECK_ROWS or num_chars + len(part) > MAX_CHECK_CHARS):
                yield rows
                rows, num_chars = [], 0
            rows.append(part)
            num_chars += len(part)
    if rows:
        yield rows
