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
    """A kernel.  least_rows: of the average expert, below which another is faster; least_in_features: of the weight.

    most_tokens: up to so many tokens of a step.  quantises: rows are quantised first; else the kernel takes them plain.
    """

    kernel: str
    least_rows: int = 0
    least_in_features: int = 0
    most_tokens: int = MOST_TOKENS
    quantises: bool = False

    @property
    def writes_out(self) -> bool:
        """Whether it is of two kernels, of which the first writes the weights out."""
        return "+" in self.kernel


Table = Mapping[tuple[str, str], tuple[Use, ...]]  # by format of the weight and the form of rows that it is made for


@dataclass(frozen=True)
class Tuning:
    """uses: the kernels of every format.

    capacity_factor: a tile of tokens holds this many times the rows of the average expert.
    wide_capacity_factor: the same of kernels on warpgroups.  An expert with 25 rows on average has more than 32 in one
    case of twelve.
    stream_capacity_factor: the same of grouped_stream; stream_block_factor: where scales are of blocks.
    least_guessed_rows: of the average expert, from which on it copies weights before it is known which have rows.
    narrow_tiles, many_tiles: tiles of output features of a CTA of grouped_w4a8_gemm.  Up to narrow_tiles one warpgroup
    along M is the fastest, up to twice as many two; above many_tiles, tiles of 32 tokens are 5 % faster than of 16.
    """

    uses: Table
    capacity_factor: float
    wide_capacity_factor: float
    stream_capacity_factor: float
    stream_block_factor: float
    least_guessed_rows: float
    narrow_tiles: int
    many_tiles: int


_GROUPED = (Use("grouped_mm"), Use("reference"))
_GROUPED_FP8 = (Use("grouped_mm", quantises=True), Use("reference", quantises=True))
_GROUPED_INT4 = (Use("grouped_int4_mm"), Use("reference"))
_GROUPED_INT4_FP8 = (Use("grouped_int4_mm", quantises=True), Use("reference", quantises=True))
H200 = Tuning(
    uses={
        ("plain", PLAIN_ROWS): (
            Use("library", least_rows=256),
            Use("grouped_mm", least_rows=49),
            # gate_up and down of V2-Lite: 148 us and 146 of grouped_stream with 0.75 rows, 250 and 244 with 3
            Use("grouped_stream", least_rows=1),
            *_GROUPED,
        ),
        # 512 rows an expert: 1536 x 2048 gated 573 us and 1509 of the library, 2048 x 768 553 and 852
        ("fp8", FP8_ROWS): (
            Use("library", least_rows=256, least_in_features=4096, quantises=True),
            # Qwen3-30B-A3B, both products, 32 rows: 187 us and 161 of grouped_stream; Mixtral, 64: 419 and 458
            Use("grouped_mm", least_rows=49, quantises=True),
            Use("grouped_stream", quantises=True),
            *_GROUPED_FP8,
        ),
        ("fp8_block", FP8_ROWS): (
            Use("grouped_mm", least_rows=49, quantises=True),
            Use("grouped_stream", quantises=True),
            *_GROUPED_FP8,
        ),
        ("int8", PLAIN_ROWS): _GROUPED,
        ("int8", INT8_ROWS): _GROUPED_FP8,
        # 8 of 28672 x 4096 on an H100: 1533 us and 1101 of the kernel at 64 rows an expert, 1731 and 3034 at 160
        ("int4", PLAIN_ROWS): (Use("dequantise_int4_16bit+grouped_mm", least_rows=96), *_GROUPED_INT4),
        ("int4", FP8_ROWS): _GROUPED_INT4_FP8,
        ("mxfp4", PLAIN_ROWS): (
            Use("dequantise_mxfp4+grouped_mm", least_rows=128),
            *_GROUPED_INT4,
        ),
        ("grouped_mxfp4", PLAIN_ROWS): (
            # 32 of 5760 x 2880: 1933 us and 2037 written out with 1,024 rows an expert, 3905 and 3671 with 2,048
            Use("dequantise_grouped_mxfp4+grouped_mm", least_rows=1536),
            # the same: 96.7 us and 102.7 of the wide kernel with 10 rows, 105.4 and 103.2 with 12; 128 experts: 391.0
            # and 419.2 with 12, 487.7 and 440.6 with 16
            Use("grouped_mxfp4_wide", least_rows=13),
            Use("grouped_mxfp4_gemm"),
            Use("dequantise_grouped_mxfp4+grouped_mm"),  # if no library of them can be built
        ),
        ("grouped_w4a16", PLAIN_ROWS): (
            # 8 of 28672 x 4096: 2181 us and 2397 written out with 512 rows an expert, 4520 and 4076 with 1,024; 128 of
            # 1536 x 2048: 1114 and 1181, 2175 and 2019
            Use("dequantise_w4a16_16bit+grouped_mm", least_rows=640),
            # the first: 171 us and 178 of the wide kernel with 4 rows, 212 and 180 with 8, 345 and 184 with 16; the
            # second: 95 and 96 with 8, 144 and 107 with 16
            Use("grouped_w4a16_wide", least_rows=12),
            Use("grouped_w4a16_gemm"),
        ),
        ("grouped_w4a16", FP8_ROWS): (
            Use("dequantise_w4a16+grouped_mm", least_rows=128, quantises=True),
            Use("grouped_w4a16_gemm", most_tokens=16),
            Use("grouped_w4a16_gemm", quantises=True),
        ),
        # the kernel of few rows quantises them
        ("grouped_w4a8", FP8_ROWS): (
            Use("dequantise_w4a8+grouped_mm", least_rows=512, quantises=True),
            Use("grouped_w4a8_gemm"),
        ),
    },
    capacity_factor=1.5,
    wide_capacity_factor=1.25,
    stream_capacity_factor=1.75,
    stream_block_factor=4,  # Qwen3-30B-A3B: tiles of 32 rows 145 us and of 64 148 with 4 rows, 164 and 152 with 16
    least_guessed_rows=1,
    narrow_tiles=4,
    many_tiles=90,
)
TUNINGS: Mapping[str, Tuning] = {"NVIDIA H200": H200}


def tuning_of(gpu: str) -> Tuning:
    return TUNINGS.get(gpu, H200)
