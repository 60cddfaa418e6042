"""The elements of an input tensor as Python values. Standard library only, no state.

Every refusal is a RequestError that names the tensor, what it has and what is accepted.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from slipstream.core.adapters import Matrix
from slipstream.core.errors import RequestError
from slipstream.core.setting_values import check_num_entries
from slipstream.core.wire_messages import DataType, ProtocolError, Tensor
from slipstream.protocol.tensor_spec import InputSpec
from slipstream.protocol.wire import bytes_elements

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
MAX_ELEMENTS = 1 << 20  # of a tensor: longer than any prompt, and some 50 ms to read


def tensor_shape(tensor: Tensor, has_batch_dim: bool) -> tuple[int, ...]:
    """The shape without the batch dimension. Raises RequestError for a batch of several prompts, or a size below 0."""
    if min(tensor.shape, default=0) < 0:
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
        check_num_entries(spec.name, num_elements)
        return _texts(tensor, num_elements)
    code = _STRUCT_CODES[spec.dtype]
    layout = f"<{num_elements}{code}"
    if len(tensor.data) != struct.calcsize(layout):
        size = struct.calcsize(layout)
        raise RequestError(spec.name, f"got {len(tensor.data)} bytes, accepted: {size} for shape {list(tensor.shape)}")
    return list(struct.unpack(layout, tensor.data))


def tensor_matrix(tensor: Tensor, spec: InputSpec, has_batch_dim: bool = False) -> Matrix:
    """A tensor of two axes as it is, with its number of bytes checked. Raises RequestError as tensor_values."""
    if tensor.dtype != spec.dtype:
        raise RequestError(spec.name, f"got a tensor of type {_type_name(tensor.dtype)}, accepted: {spec.dtype.name}")
    shape = tensor_shape(tensor, has_batch_dim)
    if len(shape) != 2 or (spec.dims[1] > 0 and shape[1] != spec.dims[1]):
        columns = "m" if spec.dims[1] < 0 else spec.dims[1]
        raise RequestError(spec.name, f"got shape {list(tensor.shape)}, accepted: [n, {columns}]")
    item = _STRUCT_CODES[spec.dtype]
    size = math.prod(shape) * struct.calcsize(f"<{item}")
    if len(tensor.data) != size:
        raise RequestError(spec.name, f"got {len(tensor.data)} bytes, accepted: {size} for shape {list(tensor.shape)}")
    return Matrix(item, (shape[0], shape[1]), tensor.data)


def _texts(tensor: Tensor, num_elements: int) -> list[str]:
    elements = _byte_elements(tensor, num_elements)
    if len(elements) != num_elements:
        raise RequestError(
            tensor.name, f"got {len(elements)} strings, accepted: {num_elements} for shape {list(tensor.shape)}"
        )
    return [decode_text(tensor.name, element) for element in elements]


def _byte_elements(tensor: Tensor, num_elements: int) -> list[bytes]:
    """At most one element more than the shape has, so that long data is refused without being read."""
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
