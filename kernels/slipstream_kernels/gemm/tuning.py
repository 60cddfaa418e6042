"""Which kernels are fastest for which products, by the name of the GPU.  Data only.

A format's kernels are tried from the first to the last; the first that covers the product, and does not refuse it,
makes it.  The last one of a format takes all other products.  Numbers were measured on one H200 (docs/measurements).
A GPU without a table of its own takes the H200's: its kernels refuse what they cannot run.  CPUs have one of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slipstream_kernels.gemm import variant_orders
from slipstream_kernels.gemm.costs import StreamCosts, StreamW4A8Costs, StreamW4A16Costs, SwapAbCosts
from slipstream_kernels.gemm.product import FP8_ROWS, INT8_ROWS, PLAIN_ROWS, Product
from slipstream_kernels.gemm.variant_orders import MOST_ROWS

Ranges = tuple[tuple[int, int], ...]  # of numbers of rows: first, last


@dataclass(frozen=True)
class Case:
    """Sizes of products, and the numbers of rows that a kernel is the fastest for among these.

    out_features, row_bytes: of a weight and one of its rows, from the first number to the last.  gated: None: either.
    ratio: input features over output features, at least.
    """

    ranges: Ranges = ((0, MOST_ROWS),)
    out_features: tuple[int, int] = (0, MOST_ROWS)
    row_bytes: tuple[int, int] = (0, MOST_ROWS)
    gated: bool | None = None
    ratio: float = 0.0

    def holds(self, product: Product) -> bool:
        weight = product.weight
        row_bytes = weight.in_features * weight.dtype.itemsize
        return (
            any(first <= product.num_rows <= last for first, last in self.ranges)
            and self.out_features[0] <= weight.out_features <= self.out_features[1]
            and self.row_bytes[0] <= row_bytes <= self.row_bytes[1]
            and self.gated in (None, product.gated)
            and weight.in_features >= self.ratio * weight.out_features
        )


@dataclass(frozen=True)
class Use:
    """A kernel, and the products that it is the fastest for."""

    kernel: str
    cases: tuple[Case, ...] = (Case(),)

    def covers(self, product: Product) -> bool:
        return any(case.holds(product) for case in self.cases)


def up_to(kernel: str, most: int) -> Use:
    return Use(kernel, (Case(((0, most),)),))


def at_least(kernel: str, least: int) -> Use:
    return Use(kernel, (Case(((least, MOST_ROWS),)),))


Table = Mapping[tuple[str, str], tuple[Use, ...]]  # by format of the weight and form of the rows


@dataclass(frozen=True)
class Tuning:
    """uses: the kernels of every format.  The rest orders the variants of one kernel.

    mixed_gemm: (warpgroups_m, splits) of tiles of up to so many tokens, the fastest first, of those that fit.
    mixed_gemm_w4a8: (warpgroups_m, splits, least, most blocks of 128 input features) of up to so many tokens, likewise;
    narrow_features: more than 64 rows, up to so many, are multiplied there with weights of up to so many output
    features, and of so many times as many input features or more.
    exact_features: up to so many rows stream_w4a8 multiplies exactly, with weights of up to so many output features.
    mixed_gemm_w4a16: (most tokens of a tile, warpgroups_m, splits, least, most blocks) of up to so many rows, likewise;
    mixed_gemm_pairs: (warpgroups_m, splits, least, most blocks) of up to so many columns, two for each row, likewise.
    small_weights: of up to so many rows, weights of up to so many numbers are not multiplied there.
    narrow_tile_costs: time of the narrow tile of a kernel on CUTLASS, of the wide one's.
    swap_ab_fp8: of FP8 rows and weights with one scale a row; swap_ab: of all others.
    always_fp8: weights with one scale a row whose input is quantised from one row on; of others from nine on.
    """

    uses: Table
    mixed_gemm: Mapping[int, tuple[tuple[int, int], ...]]
    mixed_gemm_w4a8: Mapping[int, tuple[tuple[int, int, int, int], ...]]
    narrow_features: Mapping[int, tuple[int, float]]
    exact_features: Mapping[int, int]
    mixed_gemm_w4a16: Mapping[int, tuple[tuple[int, int, int, int, int], ...]]
    mixed_gemm_pairs: Mapping[int, tuple[tuple[int, int, int, int], ...]]
    small_weights: Mapping[int, int]
    narrow_tile_costs: Mapping[str, float]
    swap_ab: SwapAbCosts
    swap_ab_fp8: SwapAbCosts
    stream: StreamCosts
    stream_w4a16: StreamW4A16Costs
    stream_w4a8: StreamW4A8Costs
    always_fp8: tuple[Case, ...]


_ANY = Use("reference")
_SCALED = (at_least("library", 65), Use("scaled_mm"), _ANY)
_INT4 = (Use("int4_mm"), _ANY)

# What an H200's SMs multiply at once, 256 output features each, and what fills more than two thirds of a second round.
_ONE_ROUND, _MOST_OF_TWO = 33792, 47309
_SWAP_AB_OF_PLAIN = Use(
    "swap_ab_gemm",
    (
        Case(((17, 32),), (16385, MOST_ROWS), gated=True),
        Case(((33, 48),), (16385, _ONE_ROUND), (8192, MOST_ROWS), gated=True),
        Case(((49, 64),), (16385, _ONE_ROUND), (10240, MOST_ROWS), gated=True),
        Case(((33, 64),), (_MOST_OF_TWO, MOST_ROWS), (10240, MOST_ROWS), gated=True),
        # narrow ones: routers, and what one round of two splits takes; 3648 x 2048 of 32 rows 7.0 us and 8.5
        Case(((17, 32),), (64, 128), (1024, 2048), gated=False),
        Case(((17, 48),), (2048, 4224), (2048, 4096), gated=False),
        Case(((17, 32),), (4225, 6144), (3072, 4096), gated=False),
        Case(((17, 32),), (12288, 16384), (8192, 10240), gated=False),
        Case(((17, 32),), (16385, MOST_ROWS), gated=False),
    ),
)
_SWAP_AB_OF_FP8 = Use(
    "swap_ab_gemm",
    (
        Case(((1, 112),), (16385, _ONE_ROUND), gated=True),
        Case(((1, 64),), (_ONE_ROUND + 1, _MOST_OF_TWO - 1), gated=True),
        Case(((1, 112),), (_MOST_OF_TWO, MOST_ROWS), gated=True),
        Case(((17, 32), (65, 128)), (0, 8192), (8192, MOST_ROWS), gated=False),
        Case(((1, 32),), (8193, 12287), (8192, MOST_ROWS), gated=False),
        Case(((17, 32), (65, 128)), (0, 12287), (2048, 8191), gated=False),
        Case(((33, 64),), (0, 3840), (2048, 8191), gated=False),  # clusters of four run at once, of 128 each
        Case(((1, 32),), (12288, 16384), (4096, 8191), gated=False),
        Case(((1, 128),), (16385, _ONE_ROUND), gated=False),
        Case(((1, 16),), (_ONE_ROUND + 1, MOST_ROWS), gated=False),
    ),
)
_STREAM_OF_FP8 = Use(
    "swap_ab_stream",
    (
        Case(((65, 128),), (0, 8192), (8192, MOST_ROWS), gated=False, ratio=1.5),
        Case(((129, 256),), (0, 4224), (8192, MOST_ROWS), gated=False, ratio=2.5),
        Case(((65, 128),), (12288, 16384), (4096, 8191), gated=False),
    ),
)
_SWAP_AB_OF_FP8_BLOCKS = Use(
    "swap_ab_gemm",
    (
        Case(((1, 64),), (16385, MOST_ROWS), gated=True),
        Case(((1, 32),), (4096, 16384), (4096, MOST_ROWS), gated=False),
        Case(((1, 32),), (16385, _ONE_ROUND), (1536, MOST_ROWS), gated=False),
    ),
)
# Above 1,024 rows a fifth tile of tokens costs more than writing weights out: 1,200 tokens of 8B 34.0 ms and 33.0.
# Few rows with wide outputs are mixed_gemm's: 28672 x 4096 at 96 rows 53 us and 59, 57344 x 8192 at 112 202 and 214.
_STREAM_OF_W4A16 = Use(
    "stream_w4a16",
    (
        Case(((65, 96),), ratio=0.75),
        Case(((65, 96),), (8193, 16384), (20480, MOST_ROWS)),  # 15360 x 5120: 44 us and 47
        Case(((97, 128),), (0, 49152)),
        Case(((129, 1024),)),
    ),
)
# Splitting rows is one more launch: 2048 x 2048 at 8 rows takes 5.7 us, by skinny_gemm_w4a16 4.7. That is faster, too,
# where a cluster has 10 tiles of 16 places (10240 x 8192 at 8 rows 21.8 us and 23.9), and so is mixed_gemm_w4a16 for 25
# rows and more of some (6144 x 4096 at 32 rows 12.7 us and 13.5). Bytes of a row of int32 words: four a feature.
_PAIRS_OF_W4A16 = Use(
    "mixed_gemm_pairs",
    (
        Case(((1, 16),), (2049, 4096), (4 * 2049, MOST_ROWS)),
        Case(((5, 16),), (0, 2048), (4 * 4097, MOST_ROWS)),
        Case(((1, 16),), (4097, 8448), (4 * 2049, MOST_ROWS)),
        Case(((9, 16),), (8449, 12287), (4 * 2048, MOST_ROWS)),
        Case(((1, 16),), (12288, MOST_ROWS), (4 * 2048, MOST_ROWS)),
        Case(((17, 32),), (0, 8448), (0, 4 * 2048)),
        Case(((17, 24),), (0, 3840), (4 * 2049, 4 * 5119)),
        Case(((17, 24),), (4225, 8448), (4 * 2049, 4 * 5119)),
        Case(((17, 32),), (16385, MOST_ROWS), (4 * 3584, 4 * 5119)),
        Case(((17, 32),), row_bytes=(4 * 5120, MOST_ROWS)),
    ),
)
# Smaller weights than 3,584 x 3,584 were not timed. Elsewhere CUTLASS is as fast: 28672 x 4096 at 112 / 200 rows 43 /
# 57 us and 45 / 61, 15360 x 5120 30 / 39 and 33 / 40; or mixed_gemm: 4096 x 4096 at 128 rows 17 us and 19.
_W4A8_ROW = 8 * 3584  # bytes of a row of int64 words, as Case counts them
_STREAM_OF_W4A8 = Use(
    "stream_w4a8",
    (
        Case(((65, 80),), (4225, MOST_ROWS), (_W4A8_ROW, MOST_ROWS)),
        Case(((81, 96),), (4225, 16384), (_W4A8_ROW, MOST_ROWS)),
        Case(((97, 112),), (4225, 12287), (_W4A8_ROW, MOST_ROWS)),
        Case(((81, 112), (129, 192)), (16385, _ONE_ROUND), (8 * 5120, MOST_ROWS)),
        Case(((81, 208),), (_ONE_ROUND + 1, MOST_ROWS), (_W4A8_ROW, MOST_ROWS)),
        Case(((65, 256),), (3584, 8448), (8 * 8192, MOST_ROWS), ratio=1.5),
        Case(((129, 208),), (4096, 4224), (8 * 4096, MOST_ROWS)),
        Case(((129, 208),), (8192, 12287), (8 * 8192, MOST_ROWS)),
        Case(((129, 160),), (12288, _ONE_ROUND), (_W4A8_ROW, MOST_ROWS)),
    ),
)
# 9 to 16 rows of few features: skinny_gemm adds up its warps' sums after each pass, 22016 x 2048 37 us and 33 here
_SWAP_AB_OF_SHORT_ROWS = Use("swap_ab_gemm", (Case(((9, 16),), (16385, MOST_ROWS), (0, 5120), gated=True),))
_LIBRARY_SPLIT = Use(
    "library_split",
    (
        Case(((129, 256),), (0, 5120), (26000, MOST_ROWS), gated=False, ratio=2.5),
        Case(((64, 192),), (0, 2048), (16384, MOST_ROWS), gated=False, ratio=4.0),
    ),
)
_USES_OF_H200: Table = {
    ("plain", PLAIN_ROWS): (
        _SWAP_AB_OF_SHORT_ROWS,
        up_to("skinny_gemm", 16),
        _SWAP_AB_OF_PLAIN,
        _LIBRARY_SPLIT,
        Use("library"),
    ),
    ("onednn", PLAIN_ROWS): (Use("onednn"),),
    ("fp8", PLAIN_ROWS): (up_to("skinny_gemm", 8), Use("dequantise")),
    ("fp8", FP8_ROWS): (_STREAM_OF_FP8, _SWAP_AB_OF_FP8, *_SCALED),
    ("fp8_block", PLAIN_ROWS): (up_to("skinny_gemm", 8), Use("dequantise")),
    ("fp8_block", FP8_ROWS): (_SWAP_AB_OF_FP8_BLOCKS, *_SCALED),
    ("int8", PLAIN_ROWS): (up_to("skinny_gemm", 16), Use("int8_mm"), _ANY),
    ("int8", INT8_ROWS): (at_least("int8_gemm", 65), Use("int8_mm"), _ANY),
    ("w8a16", PLAIN_ROWS): (
        up_to("skinny_gemm", 8),
        up_to("mixed_gemm", 256),
        Use("int8_dequantise+library"),
    ),
    # 8 rows on an H100: 24 us and 81 of int4_mm for 4096 x 4096, 106 and 354 for 4096 x 14336, 198 and 118 for 28672 x
    # 4096; 48 rows of that 199 and 168
    ("int4", PLAIN_ROWS): (
        Use("int4_canonical_dequantise+library", (Case(out_features=(0, 12288)),)),
        at_least("int4_canonical_dequantise+library", 49),
        *_INT4,
    ),
    ("int4", FP8_ROWS): _INT4,
    ("mxfp4", PLAIN_ROWS): _INT4,
    ("w4a16", PLAIN_ROWS): (
        _PAIRS_OF_W4A16,
        up_to("skinny_gemm_w4a16", 16),
        _STREAM_OF_W4A16,
        up_to("mixed_gemm_w4a16", 512),
        Use("int4_dequantise+library"),
    ),
    ("w4a8", FP8_ROWS): (_STREAM_OF_W4A8, Use("mixed_gemm_w4a8"), Use("w4a8_gemm"), Use("mixed_gemm_w4a8_parts")),
}
H200 = Tuning(
    uses=_USES_OF_H200,
    mixed_gemm={32: ((1, 2), (1, 1), (2, 1)), 64: ((2, 2), (2, 1)), 128: ((4, 2),)},
    mixed_gemm_w4a8=variant_orders.MIXED_GEMM_W4A8,
    # What 66 clusters of two CTAs have at once, and half of it.  8192 x 28672 at 128 rows 101 us, by CUTLASS 130; 4096
    # x 14336 at 200 rows 59 and 70, but 5120 x 13824 93 and 69, 4096 x 4096 24 and 22.
    narrow_features={128: (8448, 0.0), 256: (4224, 2.5)},
    exact_features={112: MOST_ROWS, 128: 8448},
    mixed_gemm_w4a16=variant_orders.MIXED_GEMM_W4A16,
    mixed_gemm_pairs=variant_orders.MIXED_GEMM_PAIRS,
    small_weights={128: 0, MOST_ROWS: 1 << 24},
    narrow_tile_costs={"int8_gemm": 0.57, "w4a8_gemm": 0.75},
    swap_ab=SwapAbCosts(),
    swap_ab_fp8=SwapAbCosts(
        bytes_per_us=5.1e6,
        sm_bytes_per_us=93e3,
        clocks_per_us=1.8e3,
        start_us=2.3,
        chunk_us=0.27,
        sum_us=0.0,
        sum_bytes_per_us=22.5e3,
    ),
    stream=StreamCosts(),
    stream_w4a16=StreamW4A16Costs(),
    stream_w4a8=StreamW4A8Costs(),
    # skinny_gemm reads all rows again for each pass: 8 rows of 15360 x 5120 29 us and 22 in FP8, of 27392 x 5120 48 and
    # 36, of 57344 x 8192 129 and 111; one row 26 and 22, 42 and 36, 113 and 111
    always_fp8=(
        Case(out_features=(8193, 12287), row_bytes=(8192, MOST_ROWS)),
        Case(out_features=(12288, 16384), row_bytes=(4097, 8191)),
        Case(out_features=(16385, MOST_ROWS), row_bytes=(4097, MOST_ROWS)),
    ),
)
_CPU = (Use("cpu"), _ANY)
_USES_OF_CPU: Table = {
    ("plain", PLAIN_ROWS): (Use("library"),),
    ("onednn", PLAIN_ROWS): (Use("onednn"),),
    ("fp8", PLAIN_ROWS): (Use("cpu"), Use("dequantise")),
    ("fp8", FP8_ROWS): _CPU,
    ("fp8_block", PLAIN_ROWS): (Use("cpu"), Use("dequantise")),
    ("fp8_block", FP8_ROWS): _CPU,
    ("int8", PLAIN_ROWS): _CPU,
    ("int8", INT8_ROWS): _CPU,
    ("int4", PLAIN_ROWS): _CPU,
    ("int4", FP8_ROWS): (_ANY,),
    ("mxfp4", PLAIN_ROWS): (_ANY,),
    ("int4_cpu", PLAIN_ROWS): (Use("cpu"),),
}
CPU = replace(H200, uses=_USES_OF_CPU)
TUNINGS: Mapping[str, Tuning] = {"NVIDIA H200": H200, "cpu": CPU}

# Up to so many rows stay in 16 bits where the input is quantised: their products take the time of reading the weight,
# and quantising would be one more kernel.
PLAIN_ROWS_OF_FP8, PLAIN_ROWS_OF_INT8 = 8, 8


def tuning_of(gpu: str) -> Tuning:
    return TUNINGS.get(gpu, H200)


def ranges_of(gpu: str, weight_format: str, kernel: str) -> list[tuple[int, int]]:
    """All numbers of rows (first, last) that the kernel is used for with weights of the format."""
    uses = [use for (name, _), all_uses in tuning_of(gpu).uses.items() if name == weight_format for use in all_uses]
    return [rows for use in uses if use.kernel == kernel for case in use.cases for rows in case.ranges]


# Bytes for each weight that kernels of many rows write out first, by its values, the form of the rows, and whether it
# is of experts; 0: the bytes of an element of the rows.
WRITTEN_OUT_BYTES = {
    ("int8", PLAIN_ROWS, False): 0,
    ("int4", PLAIN_ROWS, False): 0,
    ("int4", PLAIN_ROWS, True): 0,
    ("int4", FP8_ROWS, True): 1,
    ("mxfp4", PLAIN_ROWS, True): 0,
}
# Experts' 4-bit weights beside 16-bit rows are written out where a product's take no more than this; else the kernel of
# few rows multiplies all rows, and the memory goes to the KV pool.
MOST_WRITTEN_OUT_BYTES = 4 << 30
LIMITED_WRITE_OUTS = frozenset({("int4", PLAIN_ROWS, True)})
