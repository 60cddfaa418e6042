"""Contents of the frames between the C++ backend and the engine process: numbers, names and plain records.

Standard library only, no I/O; wire.py turns these into bytes and back and re-exports every name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

MAGIC = b"SLIP"
PROTOCOL_VERSION = 1
TOKEN_BYTES = 16
MAX_PAYLOAD_BYTES = 256 << 20
MAX_RESPONSE_BYTES = 128 << 20  # of one response; a larger one is answered with an error
FRAME_TARGET_BYTES = 1 << 20  # of a RESPONSES frame; only a single response may be longer
FRAME_HEADER_BYTES = 5

ParameterValue = str | int | bool | float


class ProtocolError(Exception):
    """The peer sent bytes that are no valid frame; the connection cannot be trusted any more."""


class FrameType(IntEnum):
    """1, 10-14: engine -> backend.  2-5: backend -> engine."""

    HELLO = 1
    CONFIG = 2
    REQUEST = 3
    CANCEL = 4
    DRAIN = 5
    READY = 10
    LOAD_FAILED = 11
    RESPONSES = 12
    METRICS = 13
    DRAINED = 14


class DataType(IntEnum):
    """TRITONSERVER_DataType."""

    BOOL = 1
    UINT8 = 2
    UINT16 = 3
    UINT32 = 4
    UINT64 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FP16 = 10
    FP32 = 11
    FP64 = 12
    BYTES = 13
    BF16 = 14


class ErrorCode(IntEnum):
    """TRITONSERVER_Error_Code."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class MetricKind(IntEnum):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class ResponseFlag(IntFlag):
    FINAL = 1
    ERROR = 2
    EMPTY = 4


@dataclass(frozen=True)
class Config:
    """The model's configuration, sent once after HELLO. config_json: Triton's whole model config."""

    model_name: str
    model_version: int
    model_dir: str
    config_json: str


@dataclass(frozen=True)
class Tensor:
    """data is Triton's serialisation: little endian, row major; BYTES elements are u32 length + bytes each."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Request:
    """arrival_ns is CLOCK_REALTIME; timeout_us 0 means none; handle is unique in the whole server process."""

    handle: int
    arrival_ns: int
    timeout_us: int
    request_id: str
    requested_outputs: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    parameters: dict[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputSpec:
    name: str
    dtype: int


@dataclass(frozen=True)
class MetricSpec:
    """One metric of a family; bounds are a histogram's upper bucket bounds, ascending.

    The backend adds the labels model and version.
    """

    family: str
    kind: int
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, ...] = ()
