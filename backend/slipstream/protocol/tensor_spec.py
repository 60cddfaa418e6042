"""The row types of the contract tables (contract_generate.py, contract_tokenize.py). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from slipstream.core.wire_messages import DataType

TYPE_NAMES = {data_type: f"TYPE_{data_type.name}" for data_type in DataType} | {DataType.BYTES: "TYPE_STRING"}


class Use(Enum):
    """The use of an input: it sets a setting, it is accepted without effect, or only neutral values are accepted."""

    SERVED = "served"
    WITHOUT_EFFECT = "without effect"
    NEUTRAL_ONLY = "neutral values only"


@dataclass(frozen=True)
class InputSpec:
    """One input tensor. dims: without the batch; -1 is any size. target: the setting that it sets (settings.py).

    neutral: the only values accepted of a NEUTRAL_ONLY tensor (an empty tensor always is); reason: why the rest is not.
    """

    name: str
    dtype: DataType
    dims: tuple[int, ...]
    target: str
    origins: tuple[str, ...]
    doc: str
    is_optional: bool = True
    use: Use = Use.SERVED
    neutral: tuple[object, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class OutputSpec:
    """One output tensor. flag: the input that asks for it ("" = sent always, or only when asked for by name)."""

    name: str
    dtype: DataType
    dims: tuple[int, ...]
    origins: tuple[str, ...]
    doc: str
    flag: str = ""
    reason: str = ""  # declared but always empty: why


@dataclass(frozen=True)
class TaskContract:
    """All tensors of one task. is_decoupled: a request may have any number of responses."""

    task: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    is_decoupled: bool

    def input(self, name: str) -> InputSpec | None:
        return next((spec for spec in self.inputs if spec.name == name), None)
