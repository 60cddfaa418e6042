"""Values of a request, from tensors, request parameters or JSON, to Python values of the type that a setting has.

Standard library only, no state. Every refusal is a RequestError that names the setting as the client wrote it, the
value and what is accepted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.core.errors import RequestError
from slipstream.core.tensor_spec import InputSpec
from slipstream.core.wire import bytes_elements
from slipstream.core.wire_messages import DataType, ProtocolError, Tensor

_STRUCT_CODES = {
    DataType.BOOL: "?",
    DataType.UINT8: "B",
    DataType.INT32: "i",
    DataType.INT64: "q",
    DataType.UINT32: "I",
    DataType.UINT64: "Q",
    DataType.FP16: "e",
    DataType.FP32: "f",
    DataType.FP64: "d",
}
MAX_INT32 = 2**31 - 1  # what a TYPE_INT32 tensor holds, and the kernels' parameters
MAX_ENTRIES, MAX_ENTRIES_CHARS = 1024, 16384  # of a list of words, ids or biases: 20 ms to make an automaton of
MAX_WORDS_ELEMENTS = 65536  # of a word list as ids: two rows, with room for padding
MAX_ELEMENTS = 1 << 20  # of a tensor: longer than any prompt, and some 50 ms to read
MAX_JSON_CHARS = 1 << 21  # some 40 ms
_TRUE, _FALSE = ("true", "1"), ("false", "0")


def shown(value: object) -> str:
    """A value as error messages show it: a long one cut."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(name, f"got {shown(value)}, accepted: {accepted}")


# ---------------------------------------------------------------- tensors


def tensor_shape(tensor: Tensor, has_batch_dim: bool) -> tuple[int, ...]:
    """The shape without the batch dimension. Raises RequestError for a batch of several prompts, or a size below 0."""
    if any(size < 0 for size in tensor.shape):
        raise RequestError(tensor.name, f"got shape {list(tensor.shape)}, accepted: sizes >= 0")
    if not has_batch_dim:
        return tensor.shape
    if not tensor.shape or tensor.shape[0] != 1:
        raise RequestError(
            tensor.name, f"got shape {list(tensor.shape)}, accepted: a batch of 1 (a request is one prompt)"
        )
    return tensor.shape[1:]


def tensor_values(tensor: Tensor, spec: InputSpec, has_batch_dim: bool = False) -> list[Any]:
    """The elements, row major; strings are decoded. A tensor of one element may have any rank.

    Raises RequestError for a wrong type, shape or size, and for text that is not UTF-8.
    """
    if tensor.dtype != spec.dtype:
        raise RequestError(spec.name, f"got a tensor of type {_type_name(tensor.dtype)}, accepted: {spec.dtype.name}")
    shape = tensor_shape(tensor, has_batch_dim)
    num_elements = math.prod(shape)
    if num_elements > MAX_ELEMENTS:
        accepted = f"at most {MAX_ELEMENTS}" if not spec.reason else f"an empty tensor, because {spec.reason}"
        raise RequestError(spec.name, f"got {num_elements} elements, accepted: {accepted}")
    if spec.dims == (1,) and num_elements != 1:
        raise RequestError(spec.name, f"got shape {list(tensor.shape)}, accepted: one element")
    if len(spec.dims) == 2 and spec.dims[0] > 1 and (len(shape) < 2 or shape[-2] != spec.dims[0]):
        raise RequestError(spec.name, f"got shape {list(tensor.shape)}, accepted: [{spec.dims[0]}, n]")
    if spec.dtype is DataType.BYTES:
        _check_num_entries(spec.name, num_elements)
        return _texts(tensor, num_elements)
    code = _STRUCT_CODES[spec.dtype]
    layout = f"<{num_elements}{code}"
    if len(tensor.data) != struct.calcsize(layout):
        size = struct.calcsize(layout)
        raise RequestError(spec.name, f"got {len(tensor.data)} bytes, accepted: {size} for shape {list(tensor.shape)}")
    return list(struct.unpack(layout, tensor.data))


def _texts(tensor: Tensor, num_elements: int) -> list[str]:
    elements = _byte_elements(tensor, num_elements)
    if len(elements) != num_elements:
        raise RequestError(
            tensor.name, f"got {len(elements)} strings, accepted: {num_elements} for shape {list(tensor.shape)}"
        )
    return [decode_text(tensor.name, element) for element in elements]


def _byte_elements(tensor: Tensor, num_elements: int) -> list[bytes]:
    """Up to one more than there should be, however many the data holds."""
    try:
        return bytes_elements(tensor.data, num_elements + 1)
    except ProtocolError as error:
        raise RequestError(tensor.name, f"not a serialised string tensor: {error}") from None


def decode_text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            name,
            f"not valid UTF-8: {error.reason} at byte {error.start} (0x{data[error.start]:02x}), accepted: UTF-8 text",
        ) from None


def _type_name(dtype: int) -> str:
    try:
        return DataType(dtype).name
    except ValueError:
        return str(dtype)


# ---------------------------------------------------------------- values of JSON and request parameters
# A reader takes (name, value) and returns the typed value. Numbers may be strings, as the vLLM backend allows.


def read_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | str) and str(value).lower() in (*_TRUE, *_FALSE):
        return str(value).lower() in _TRUE
    raise refuse(name, value, "true or false")


def read_int(name: str, value: object) -> int:
    try:
        if isinstance(value, str):
            return int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and int(value) == value:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise refuse(name, value, "an integer")


def read_float(name: str, value: object) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise refuse(name, value, "a number")


def check_text(name: str, value: object) -> None:
    """Raises RequestError for text that has no UTF-8 form: undecodable bytes of a parameter, half a JSON surrogate."""
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
        _check_num_entries(name, len(texts))
    if isinstance(texts, Sequence) and all(isinstance(entry, str) for entry in texts):
        for text in texts:
            check_text(name, text)
        return tuple(texts)
    raise refuse(name, value, "a string or a list of strings")


def read_ids(name: str, value: object) -> tuple[int, ...]:
    value = parse_json(name, value, "a list of token ids") if isinstance(value, str) else value
    if isinstance(value, Sequence):
        ids = tuple(_integers(name, value))
        if not ids or (min(ids) >= 0 and max(ids) <= MAX_INT32):
            return ids
    raise refuse(name, value, "a list of token ids")


def _integers(name: str, values: Sequence[object]) -> Sequence[int]:
    """Those of a tensor, perhaps a whole prompt, are looked at by type only: once per type."""
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
    words = tuple(tuple(ids[start:end]) for start, end in zip(starts, offsets))
    if any(min(word) < 0 or max(word) > MAX_INT32 for word in words):
        raise refuse(name, value, accepted)
    return words


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
    return tuple((read_ids(name, [token_id])[0], read_float(name, bias)) for token_id, bias in value.items())


def read_object(name: str, value: object) -> dict[str, Any]:
    value = parse_json(name, value, "a JSON object") if isinstance(value, str) else value
    if isinstance(value, dict):
        return value
    raise refuse(name, value, "a JSON object")


def check_list(name: str, entries: Sequence[object]) -> None:
    """Raises RequestError for a long one: every entry costs every token work, and encoding holds up other requests.

    embedding_bias is no such list: it is one tensor.
    """
    _check_num_entries(name, len(entries))
    num_chars = sum(len(entry) for entry in entries if isinstance(entry, str | tuple))
    if num_chars > MAX_ENTRIES_CHARS:
        accepted = f"at most {MAX_ENTRIES_CHARS}"
        raise RequestError(name, f"got {num_chars} characters or token ids in all, accepted: {accepted}")


def _check_num_entries(name: str, num_entries: int) -> None:
    if num_entries > MAX_ENTRIES:
        raise RequestError(name, f"got {num_entries} entries, accepted: at most {MAX_ENTRIES}")


def parse_json(name: str, text: str, accepted: str) -> Any:
    if len(text) > MAX_JSON_CHARS:
        raise RequestError(name, f"got {len(text)} characters, accepted: at most {MAX_JSON_CHARS}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(name, f"got {shown(text)}, which is not JSON ({error}); accepted: {accepted}") from None


Reader = Callable[[str, object], Any]
