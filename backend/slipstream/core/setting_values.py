"""Reads values of tensors, request parameters and JSON as Python values of a setting's type.

Standard library only, no state. A reader takes (name, value) and returns the typed value; numbers may be strings, as
the vLLM backend allows. Every refusal is a RequestError that names the setting as the client wrote it, the value and
what is accepted. Bounds are the kinds' (setting_kinds.py), which call these.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slipstream.core.errors import RequestError
from slipstream.core.numerals import read_decimal, read_whole

MAX_INT32 = 2**31 - 1  # what a TYPE_INT32 tensor holds, and the kernels' parameters
MAX_ENTRIES, MAX_ENTRIES_CHARS = 1024, 16384  # of a list of words, ids or biases: 20 ms to make an automaton of
MAX_WORDS_ELEMENTS = 65536  # of a word list as ids: two rows, with room for padding
MAX_JSON_CHARS = 1 << 21  # some 40 ms
_TRUE, _FALSE = ("true", "1"), ("false", "0")


def shown(value: object) -> str:
    """A value as error messages show it, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(name, f"got {shown(value)}, accepted: {accepted}")


def read_bool(name: str, value: object, accepted: str = "true or false") -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | str) and str(value).lower() in (*_TRUE, *_FALSE):
        return str(value).lower() in _TRUE
    raise refuse(name, value, accepted)


def read_int(name: str, value: object, accepted: str = "an integer") -> int:
    try:
        if isinstance(value, str):
            return read_whole(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and int(value) == value:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise refuse(name, value, accepted)


def read_float(name: str, value: object, accepted: str = "a number") -> float:
    try:
        if isinstance(value, str):
            return read_decimal(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise refuse(name, value, accepted)


def check_text(name: str, value: object) -> None:
    """Raises RequestError for text that UTF-8 cannot encode: undecodable bytes of a parameter, half a surrogate."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            shown_name = name.encode("utf-8", "backslashreplace").decode()
            raise RequestError(shown_name, f"not valid UTF-8: {shown(value)}, accepted: UTF-8 text") from None


def read_text(name: str, value: object) -> str:
    check_text(name, value)
    if isinstance(value, str):
        return value
    raise refuse(name, value, "a string")


def read_texts(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, Sequence):
        check_num_entries(name, len(texts))
    if isinstance(texts, Sequence) and all(isinstance(entry, str) for entry in texts):
        for text in texts:
            check_text(name, text)
        return tuple(texts)
    raise refuse(name, value, "a string or a list of strings")


def read_ids(name: str, value: object) -> tuple[int, ...]:
    value = parse_json(name, value, "a list of token ids") if isinstance(value, str) else value
    if isinstance(value, Sequence):
        return tuple(_integers(name, value))
    raise refuse(name, value, "a list of token ids")


def _integers(name: str, values: Sequence[object]) -> Sequence[int]:
    """Integers of a list. A tensor's, perhaps a whole prompt, are passed on after one look at each type."""
    if set(map(type, values)) <= {int}:
        return values  # type: ignore[return-value]
    return [read_int(name, value) for value in values]


def read_numbers(name: str, value: object) -> tuple[float, ...]:
    value = parse_json(name, value, "a list of numbers") if isinstance(value, str) else value
    if isinstance(value, Sequence):
        if set(map(type, value)) == {float}:  # a tensor's, perhaps one per token of the vocabulary
            return tuple(value)
        return tuple(read_float(name, entry) for entry in value)
    raise refuse(name, value, "a list of numbers")


def read_words_ids(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    """TensorRT-LLM's word list as a flat [2, n]: row 0 the ids of all words, row 1 each word's end offset, -1 pads."""
    accepted = "row 0 the ids of all words, row 1 the end offset of each word, rising, padded with -1"
    value = parse_json(name, value, accepted) if isinstance(value, str) else value
    if not isinstance(value, Sequence):
        raise refuse(name, value, accepted)
    flat = _integers(name, _flat(name, value))
    half = len(flat) // 2
    ids, offsets = flat[:half], [offset for offset in flat[half:] if offset >= 0]
    starts = [0, *offsets[:-1]]
    if len(flat) % 2 or any(not start < end <= half for start, end in zip(starts, offsets)):
        raise refuse(name, value, accepted)
    return tuple(tuple(ids[start:end]) for start, end in zip(starts, offsets))


def _flat(name: str, rows: Sequence[Any]) -> Sequence[object]:
    """The elements of a tensor, or of the rows of a JSON text."""
    if not set(map(type, rows)) <= {int}:
        rows = [entry for row in rows for entry in (row if isinstance(row, Sequence) else [row])]
    if len(rows) > MAX_WORDS_ELEMENTS:
        raise RequestError(name, f"got {len(rows)} elements, accepted: at most {MAX_WORDS_ELEMENTS}")
    return rows


def read_logit_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    accepted = 'an object {"token id": bias}'
    value = parse_json(name, value, accepted) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise refuse(name, value, accepted)
    return tuple((read_int(name, token_id), read_float(name, bias)) for token_id, bias in value.items())


def read_object(name: str, value: object) -> dict[str, Any]:
    value = parse_json(name, value, "a JSON object") if isinstance(value, str) else value
    if isinstance(value, dict):
        return value
    raise refuse(name, value, "a JSON object")


def check_list(name: str, entries: Sequence[object]) -> None:
    """Raises RequestError for a long list: each entry costs work at every token, and encoding delays other requests.

    embedding_bias has its own bound, the vocabulary.
    """
    check_num_entries(name, len(entries))
    num_chars = sum(len(entry) for entry in entries if isinstance(entry, str | tuple))
    if num_chars > MAX_ENTRIES_CHARS:
        accepted = f"at most {MAX_ENTRIES_CHARS}"
        raise RequestError(name, f"got {num_chars} characters or token ids in all, accepted: {accepted}")


def check_num_entries(name: str, num_entries: int) -> None:
    if num_entries > MAX_ENTRIES:
        raise RequestError(name, f"got {num_entries} entries, accepted: at most {MAX_ENTRIES}")


def parse_json(name: str, text: str, accepted: str) -> Any:
    if len(text) > MAX_JSON_CHARS:
        raise RequestError(name, f"got {len(text)} characters, accepted: at most {MAX_JSON_CHARS}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(name, f"got {shown(text)}, which is not JSON ({error}); accepted: {accepted}") from None
