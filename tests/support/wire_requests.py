"""Wire requests for tests: tensors from Python values, by the contract's own types."""

from __future__ import annotations

import math
import struct

import backend_wire
from slipstream.protocol import wire
from slipstream.protocol.contract import GENERATE, OUTPUTS
from slipstream.protocol.tensor_spec import TaskContract

_CODES = {"BOOL": "?", "UINT8": "B", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP16": "e", "FP32": "f"}
ALL_OUTPUTS = tuple(spec.name for spec in OUTPUTS["generate"])


def tensor(
    name: str, values: object, shape: tuple[int, ...] | None = None, task: TaskContract = GENERATE
) -> wire.Tensor:
    """values: one value or a flat list; the type is that of the contract."""
    spec = task.input(name)
    assert spec is not None, name
    flat = list(values) if isinstance(values, list | tuple) else [values]
    shape = (len(flat),) if shape is None else shape
    assert math.prod(shape) == len(flat)
    if spec.dtype is wire.DataType.BYTES:
        data = wire.bytes_tensor(v.encode() if isinstance(v, str) else v for v in flat)
    else:
        data = struct.pack(f"<{len(flat)}{_CODES[spec.dtype.name]}", *flat)
    return wire.Tensor(name, int(spec.dtype), shape, data)


def request(
    *tensors: wire.Tensor,
    parameters: dict[str, wire.ParameterValue] | None = None,
    outputs: tuple[str, ...] = ALL_OUTPUTS,
    request_id: str = "",
    timeout_us: int = 0,
    arrival_ns: int = 0,
) -> wire.Request:
    return wire.Request(7, arrival_ns, timeout_us, request_id, outputs, tensors, parameters or {})


def output_values(name: str, shape: tuple[int, ...], data: bytes, task: str = "generate") -> list[object]:
    """The elements of an answered tensor."""
    dtype = wire.DataType(next(spec.dtype for spec in OUTPUTS[task] if spec.name == name))
    if dtype is wire.DataType.BYTES:
        return [element.decode() for element in wire.bytes_elements(data)]
    return list(struct.unpack(f"<{math.prod(shape)}{_CODES[dtype.name]}", data))


def answers(entry: bytes, task: str = "generate") -> dict[str, tuple[tuple[int, ...], list[object]]]:
    """name -> (shape, values) of one encoded response."""
    frame = wire.encode_responses([entry])
    (response,) = backend_wire.decode_responses(backend_wire.payload_of(frame))
    names = [spec.name for spec in OUTPUTS[task]]
    return {names[i]: (shape, output_values(names[i], shape, data, task)) for i, shape, data in response.outputs}
