"""The kinds of values that a setting may have. A kind reads what a client gave, checks it and says what is accepted.

Standard library only, no state. The bounds of a setting are in its kind alone: requests are read by it, SamplingParams
checks by it, the gateway's schema and the docs quote it. What passes fits the type that the engine holds it in: int32
and fp32, seeds 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

from slipstream.core import setting_values as values
from slipstream.core.adapters import Matrix
from slipstream.core.errors import RequestError
from slipstream.core.logits_processors import ACCEPTED, ProcessorCall, check_calls, read_calls
from slipstream.core.setting_values import MAX_ENTRIES, MAX_INT32, check_list, refuse
from slipstream.core.wire_messages import DataType


class Kind(Protocol):
    @property
    def accepted(self) -> str:
        """The accepted values in words: "an integer from 1 to 128"."""

    def read(self, name: str, value: object) -> Any:
        """Read and check the value of a tensor, request parameter or JSON key `name`. Raises RequestError."""

    def check(self, name: str, value: Any) -> None:
        """Raises RequestError for a Python value that `read` could not have returned."""


@dataclass(frozen=True)
class Integer:
    low: int = 0
    high: int = MAX_INT32
    words: str = ""

    @property
    def accepted(self) -> str:
        return self.words or f"an integer from {self.low} to {self.high}"

    def read(self, name: str, value: object) -> int:
        number = values.read_int(name, value, self.accepted)
        if self.low <= number <= self.high:
            return number
        raise refuse(name, number, self.accepted)

    def check(self, name: str, value: Any) -> None:
        if not (_is(value, Integral) and self.low <= value <= self.high):
            raise refuse(name, value, self.accepted)


@dataclass(frozen=True)
class Number:
    """Neither NaN nor an infinity passes."""

    low: float
    high: float
    words: str = ""

    @property
    def accepted(self) -> str:
        return self.words or f"a number from {self.low:g} to {self.high:g}"

    def read(self, name: str, value: object) -> float:
        number = values.read_float(name, value, self.accepted)
        if self.low <= number <= self.high:
            return number
        raise refuse(name, number, self.accepted)

    def check(self, name: str, value: Any) -> None:
        if not (_is(value, Real) and self.low <= value <= self.high):
            raise refuse(name, value, self.accepted)


@dataclass(frozen=True)
class Flag:
    accepted: str = "true or false"

    def read(self, name: str, value: object) -> bool:
        return values.read_bool(name, value)

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise refuse(name, value, self.accepted)


@dataclass(frozen=True)
class Text:
    """max_bytes: in UTF-8; None for a prompt or a grammar, which have limits of their own."""

    max_bytes: int | None = None

    @property
    def accepted(self) -> str:
        return "text" if self.max_bytes is None else f"text of at most {self.max_bytes} bytes"

    def read(self, name: str, value: object) -> str:
        text = values.read_text(name, value)
        self.check(name, text)
        return text

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, str):
            raise refuse(name, value, self.accepted)
        if self.max_bytes is not None and (num_bytes := len(value.encode("utf-8"))) > self.max_bytes:
            raise RequestError(name, f"got {num_bytes} bytes, accepted: at most {self.max_bytes}")


@dataclass(frozen=True)
class Choice:
    """One of some words. An empty text is none of them: the default."""

    choices: tuple[str, ...]

    @property
    def accepted(self) -> str:
        return ", ".join(self.choices)

    def read(self, name: str, value: object) -> str | None:
        text = values.read_text(name, value)
        if not text:
            return None
        self.check(name, text)
        return text

    def check(self, name: str, value: Any) -> None:
        if value not in self.choices:
            raise refuse(name, value, self.accepted)


@dataclass(frozen=True)
class Texts:
    """A list of strings, or one string. has_empty: an empty string may be among them."""

    has_empty: bool = False

    @property
    def accepted(self) -> str:
        return f"a string or a list of strings{'' if self.has_empty else ', all non-empty'}"

    def read(self, name: str, value: object) -> tuple[str, ...]:
        texts = values.read_texts(name, value)
        check_list(name, texts)
        self.check(name, texts)
        return texts

    def check(self, name: str, value: Any) -> None:
        if not (_is_list(value) and _are_kind(value, str) and (self.has_empty or all(value))):
            raise refuse(name, value, self.accepted)
        for text in value:
            values.check_text(name, text)


@dataclass(frozen=True)
class TokenIds:
    """is_text: the tokens of a text, which may be as long as a prompt; else a list with an end (check_list)."""

    is_text: bool = False
    is_empty_accepted: bool = True
    max_entries: int = MAX_ENTRIES

    @property
    def accepted(self) -> str:
        bound = f", at most {self.max_entries}" if self.max_entries < MAX_ENTRIES else ""
        return f"token ids from 0 to {MAX_INT32}{bound}{'' if self.is_empty_accepted else ', one at least'}"

    def read(self, name: str, value: object) -> tuple[int, ...]:
        token_ids = values.read_ids(name, value)
        if not self.is_text:
            check_list(name, token_ids)
        self.check(name, token_ids)
        return token_ids

    def check(self, name: str, value: Any) -> None:
        is_short = _is_list(value) and (self.is_text or len(value) <= self.max_entries)
        if not (is_short and (_are_token_ids(value) if value else self.is_empty_accepted)):
            raise refuse(name, value, self.accepted)

    def token_ids(self, value: tuple[int, ...]) -> Collection[int]:
        return value


@dataclass(frozen=True)
class WordsIds:
    """Words as token ids. Read from TensorRT-LLM's layout of two rows."""

    accepted: str = f"non-empty lists of token ids from 0 to {MAX_INT32}"

    def read(self, name: str, value: object) -> tuple[tuple[int, ...], ...]:
        words = values.read_words_ids(name, value)
        check_list(name, words)
        self.check(name, words)
        return words

    def check(self, name: str, value: Any) -> None:
        if not (_is_list(value) and all(_is_list(word) and word and _are_token_ids(word) for word in value)):
            raise refuse(name, value, self.accepted)

    def token_ids(self, value: tuple[tuple[int, ...], ...]) -> Collection[int]:
        return [token_id for word in value for token_id in word]


@dataclass(frozen=True)
class TokenBiases:
    """(token id, bias) pairs; in JSON an object {"token id": bias}. limit: of a bias, either way."""

    limit: float

    @property
    def accepted(self) -> str:
        return f"biases from {-self.limit:g} to {self.limit:g} of token ids from 0 to {MAX_INT32}"

    def read(self, name: str, value: object) -> tuple[tuple[int, float], ...]:
        pairs = values.read_logit_bias(name, value)
        check_list(name, pairs)
        self.check(name, pairs)
        return pairs

    def check(self, name: str, value: Any) -> None:
        if not (_is_list(value) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in value)):
            raise refuse(name, value, self.accepted)
        token_ids, biases = [token_id for token_id, _ in value], [bias for _, bias in value]
        if not (_are_token_ids(token_ids) and _are_numbers(biases, self.limit)):
            raise refuse(name, value, self.accepted)

    def token_ids(self, value: tuple[tuple[int, float], ...]) -> Collection[int]:
        return [token_id for token_id, _ in value]


@dataclass(frozen=True)
class Biases:
    """One bias per word, or per token of the vocabulary."""

    limit: float

    @property
    def accepted(self) -> str:
        return f"biases from {-self.limit:g} to {self.limit:g}"

    def read(self, name: str, value: object) -> tuple[float, ...]:
        biases = values.read_numbers(name, value)
        self.check(name, biases)
        return biases

    def check(self, name: str, value: Any) -> None:
        if not (_is_list(value) and _are_numbers(value, self.limit)):
            raise refuse(name, value, self.accepted)


@dataclass(frozen=True)
class Numbers:
    """A tensor of two axes that is not read into numbers here. num_columns: -1 for any."""

    dtype: DataType
    num_columns: int = -1

    @property
    def accepted(self) -> str:
        return f"a tensor of type {self.dtype.name} and shape [n, {'m' if self.num_columns < 0 else self.num_columns}]"

    def read(self, name: str, value: object) -> Matrix:
        self.check(name, value)
        assert isinstance(value, Matrix)
        return value

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, Matrix):
            raise refuse(name, value, self.accepted)


@dataclass(frozen=True)
class Object:
    accepted: str = "a JSON object"

    def read(self, name: str, value: object) -> dict[str, Any]:
        return values.read_object(name, value)

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise refuse(name, value, self.accepted)


@dataclass(frozen=True)
class Processors:
    accepted: str = ACCEPTED

    def read(self, name: str, value: object) -> tuple[ProcessorCall, ...]:
        return read_calls(name, value)

    def check(self, name: str, value: Any) -> None:
        check_calls(name, value)


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    """An iterator is none, as a check would leave nothing of it."""
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | memoryview)


def _are_kind(entries: Any, kind: type) -> bool:
    """Looks at each type once: there may be hundreds of thousands of entries."""
    return all(issubclass(found, kind) and found is not bool for found in set(map(type, entries)))


def _are_token_ids(token_ids: Any) -> bool:
    return not token_ids or (_are_kind(token_ids, Integral) and min(token_ids) >= 0 and max(token_ids) <= MAX_INT32)


def _are_numbers(numbers: Any, limit: float) -> bool:
    if not numbers:
        return True
    are_real = _are_kind(numbers, Real) and not math.isnan(sum(numbers))
    return are_real and min(numbers) >= -limit and max(numbers) <= limit
