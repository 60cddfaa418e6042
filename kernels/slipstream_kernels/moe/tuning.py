"""Which kernels are fastest for the products of experts, by the name of the GPU.  Data only; as gemm/tuning.py.

Numbers of rows are of the average expert: how many each expert has is known on the device alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream_kernels.gemm.product import FP8_ROWS, INT8_ROWS, PLAIN_ROWS

MOST_TOKENS = 1 << 31


@dataclass(frozen=True)
class Use:
    """A kernel.  least_rows: of the average expert, below which another is faster.

    most_tokens: up to so many tokens of a step.  quantises: rows are quantised first; else the kernel takes them plain.
    """

    kernel: str
    least_rows: int = 0
    most_tokens: int = MOST_TOKENS
    quantises: bool = False


Table = Mapping[tuple[str, str], tuple[Use, ...]]  # by format of the weight and the form of rows that it is made for


@dataclass(frozen=True)
class Tuning:
    """uses: the kernels of every format.

    room: rows that a tile should have room for, of the average expert's.
    narrow_strips: of a CTA of record_experts, for each of its warpgroups that are worth having; many_strips: of a CTA,
    from which on tiles of 32 rows are a twentieth faster than those of 16.
    """

    uses: Table
    room: float
    narrow_strips: int
    many_strips: int


_GROUPED = (Use("grouped_mm"), Use("reference"))
_GROUPED_FP8 = (Use("grouped_mm", quantises=True), Use("reference", quantises=True))
_GROUPED_INT4 = (Use("grouped_int4_mm"), Use("reference"))
_GROUPED_INT4_FP8 = (Use("grouped_int4_mm", quantises=True), Use("reference", quantises=True))

H200 = Tuning(
    uses={
        ("plain", PLAIN_ROWS): (Use("library", least_rows=256), *_GROUPED),
        ("fp8", FP8_ROWS): (Use("library", least_rows=256, quantises=True), *_GROUPED_FP8),
        ("fp8_block", FP8_ROWS): _GROUPED_FP8,
        ("int8", PLAIN_ROWS): _GROUPED,
        ("int8", INT8_ROWS): _GROUPED_FP8,
        ("int4", PLAIN_ROWS): _GROUPED_INT4,
        ("int4", FP8_ROWS): _GROUPED_INT4_FP8,
        ("int4_pairs", PLAIN_ROWS): (Use("int4_experts"),),
        ("int4_pairs", FP8_ROWS): (
            Use("expert_weights+grouped_mm", least_rows=128, quantises=True),
            Use("int4_experts", most_tokens=16),
            Use("int4_experts", quantises=True),
        ),
        # the kernel quantises rows on their way
        ("int4_records", FP8_ROWS): (
            Use("record_weights+grouped_mm", least_rows=512, quantises=True),
            Use("record_experts"),
        ),
    },
    room=1.5,
    narrow_strips=4,
    many_strips=90,
)
TUNINGS: Mapping[str, Tuning] = {"NVIDIA H200": H200}


def tuning_of(gpu: str) -> Tuning:
    return TUNINGS.get(gpu, H200)
