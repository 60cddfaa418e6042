"""Products of many FP8 rows with 4-bit weights in evenly shared chunks: right however they are cut, and the choice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import emulation
import pytest
import torch
import w4a8_emulator
from hopper import assert_compiles_well, needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.fp8 import E4M3, Fp8Rows, Fp8Scheme
from slipstream_kernels.gemm import w4a8_layout
from slipstream_kernels.gemm.choose import variant_of
from slipstream_kernels.gemm.cuda import stream_w4a8 as cuda_stream
from slipstream_kernels.gemm.cuda.stream_plan import COUNTER_ROWS
from slipstream_kernels.gemm.cuda.stream_w4a8_choice import (
    EXACT,
    MAX_TOKENS,
    ROUNDED,
    TILES,
    Plan,
    Tile,
    choose,
    plans,
    tiles_for,
)
from slipstream_kernels.gemm.product import FP8_ROWS, Product, WeightKind
from slipstream_kernels.gemm.reference.int4_mm import unpack_int4
from slipstream_kernels.gemm.tuning import H200
from slipstream_kernels.integer import W4A8_DTYPE, Int4Weight

# us of one H200 behind a norm that quantises, by kernel and by tile (rows, columns, is_exact), tiles and CTAs
TIMES = json.loads((Path(__file__).parents[1] / "golden" / "stream_w4a8_times.json").read_text())
LOSS, TOTAL_LOSS = 1.12, 1.02  # of the fastest of all kernels, in one cell and in all
MOST_ERROR = 4e-3  # of the results' norm
SHAPES = [(1072, 1152), (2048, 4096), (384, 14336), (16, 128)]  # tiles that are not full, many chunks, one unit
GPU = torch.device("cuda:0")


def canonical(size: tuple[int, int], group_size: int, has_zeros: bool, device: str) -> Int4Weight:
    """Random codes, scales and zero points; group_size 0: one group a row."""
    out_features, in_features = size
    packed = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    num_groups = in_features // (group_size or in_features)
    scales = (0.5 + torch.rand(out_features, num_groups, device=device)) * in_features**-0.5 / 4
    zeros = torch.randint(17, scales.shape, dtype=torch.uint8, device=device) if has_zeros else None
    return Int4Weight(packed, scales, zeros, group_size or in_features, out_features, in_features)


def numbers_of(weight: Int4Weight, repacked: Int4Weight, tile: Tile) -> torch.Tensor:
    """What the tile multiplies by, in fp64: the entries of its rows' tables times the channel scale, or exactly."""
    assert repacked.zeros is not None
    if tile.is_exact:
        return ops.dequantize_int4(weight).double()
    return table_entries(weight, repacked) * repacked.zeros.double()[:, None]


def table_entries(weight: Int4Weight, repacked: Int4Weight) -> torch.Tensor:
    """As csrc/formats/int4_table.cuh makes them, [out_features, in_features] in fp64: near a tie between two numbers of
    e4m3, the nearest of a weight is another one."""
    halves = ((repacked.scales >> shift).to(torch.int16).view(torch.float16).float() for shift in (0, 16))
    scale, zero = (half.transpose(0, 1).flatten(1) for half in halves)  # [out_features, groups of a row]
    width = weight.in_features // scale.shape[1]
    scale, bias = (scale / 512).repeat_interleave(width, 1), (zero * 512).repeat_interleave(width, 1)
    codes = unpack_int4(weight.packed).float()
    quarter = codes - codes % 4
    return ((quarter + bias) * scale + codes % 4 * scale).to(E4M3).double()


def rows_of(num_tokens: int, weight: Int4Weight, device: str) -> Fp8Rows:
    x = torch.randn(num_tokens, weight.in_features, device=device).bfloat16()
    return ops.quantize_fp8(x, Fp8Scheme(sum_columns=w4a8_layout.sum_columns(weight.group_size)))


def error_of(out: torch.Tensor, rows: Fp8Rows, numbers: torch.Tensor, bias: torch.Tensor) -> float:
    expected = (rows.values.double() * rows.scales.double()) @ numbers.t() + bias.double()
    return float((out.double() - expected).norm() / expected.norm())


def can_take(num_tokens: int, tile: Tile) -> bool:
    is_one_tile = num_tokens <= tile.columns or tile.columns == 128
    return -(-num_tokens // tile.columns) * tile.columns <= MAX_TOKENS and (is_one_tile or not tile.is_exact)


def some_plans(num_tokens: int, size: tuple[int, int], tile: Tile, most_ctas: int) -> Iterator[Plan]:
    """Those of the choice, and others: runs that end inside of tiles, one CTA for all."""
    chosen = list(plans(num_tokens, size, tile, most_ctas))
    most = chosen[0].num_tiles * (size[1] // 128)
    yield from dict.fromkeys([*chosen, *(chosen[0]._replace(num_ctas=min(count, most)) for count in (1, 7, 77))])


def test_plans_can_run() -> None:
    """As `fits` of sm90_stream_w4a8.cu, with the counters that a weight comes with and the memory that is planned."""
    shapes = itertools.product((16, 144, 3584, 10240, 57344), (128, 4096, 28672))
    for size, num_sms, num_tokens in itertools.product(shapes, (1, 16, 78, 114, 132), (1, 65, 113, 200, 256, 512)):
        units, chunks = size[0] // 16, size[1] // 128
        for tile in tiles_for(num_tokens, size[0]):
            assert can_take(num_tokens, tile)
            for plan in plans(num_tokens, size, tile, num_sms):
                of_rows = plan.num_tiles // plan.token_tiles
                assert plan.num_tiles % plan.token_tiles == 0 and plan.token_tiles * tile.columns >= num_tokens
                assert of_rows <= units and -(-units // of_rows) * 16 <= tile.rows and plan.tile == tile
                assert 1 <= plan.num_ctas <= min(num_sms, plan.num_tiles * chunks)
                assert (plan.num_tiles * chunks + 1) * (plan.num_ctas + 1) < 1 << 32
                assert not plan.is_split or 4 * plan.num_tiles <= size[0] // COUNTER_ROWS
                assert 2 * 4 * plan.num_ctas * plan.slot_floats <= ops.w4a8_sums_bytes(num_sms)


def test_few_tokens_are_multiplied_exactly() -> None:
    for num_tokens, out_features, tiles in ((65, 57344, EXACT), (112, 57344, EXACT), (128, 8192, EXACT)):
        assert set(tiles_for(num_tokens, out_features)) <= set(tiles)
    for num_tokens, out_features in ((113, 57344), (129, 4096), (256, 4096)):
        assert set(tiles_for(num_tokens, out_features)) <= set(ROUNDED)


def test_the_fastest_kernel_and_plan_that_were_measured_are_chosen() -> None:
    taken, least = 0.0, 0.0
    for cell in TIMES:
        size, num_tokens, us = (cell["out_features"], cell["in_features"]), cell["num_tokens"], cell["us"]
        kind = WeightKind("w4a8", *size, W4A8_DTYPE, torch.device("cpu"), 128, FP8_ROWS)
        product = Product(kind, num_tokens, FP8_ROWS, torch.bfloat16, False)
        use = next(
            use for use in H200.uses["w4a8", FP8_ROWS] if use.covers(product) and (use.kernel in us or use.cases)
        )
        if use.kernel == "stream_w4a8":
            plan = choose(num_tokens, size, lambda tile: 132)
            assert plan is not None
            name = "/".join(map(str, plan[:5]))
        else:
            name = "mixed_gemm_w4a8" if num_tokens <= 128 and size[0] <= 8448 else "w4a8_gemm"
        if name not in us:
            continue  # a plan that was not timed
        assert us[name] <= LOSS * min(us.values()), (cell, name)
        taken, least = taken + us[name], least + min(us.values())
    assert taken <= TOTAL_LOSS * least


@pytest.mark.parametrize("group_size", [64, 128, 0])
def test_entries_are_those_of_the_kernels_on_cutlass(group_size: int) -> None:
    weight = canonical((48, 384), group_size, True, "cpu")
    repacked = w4a8_layout.repack(weight)
    assert torch.equal(table_entries(weight, repacked), w4a8_emulator.table_operand(repacked).double())


@pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
@pytest.mark.parametrize(
    ("size", "group_size", "num_tokens", "tile", "num_ctas"),
    [
        ((272, 384), 128, 70, Tile(192, 80, 1), 3),  # one set of parts; CTAs that share tiles
        ((208, 384), 64, 100, Tile(192, 112, 1), 1),  # two groups of a chunk
        ((400, 256), 0, 200, Tile(128, 128, 1), 4),  # two tiles of tokens, whole rows
        ((208, 640), 128, 90, Tile(128, 96, 1), 3),  # two sets of parts, an odd number of chunks and an even one
        ((208, 128), 128, 66, Tile(128, 80, 1), 2),  # one chunk
        ((272, 384), 128, 130, Tile(192, 160, 0), 4),  # tables
        ((144, 384), 64, 250, Tile(128, 256, 0), 2),
        ((144, 256), 0, 230, Tile(192, 208, 0), 1),  # two tiles of tokens
    ],
    ids=str,
)
def test_thread_by_thread(size, group_size, num_tokens, tile, num_ctas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device code on the CPU."""
    torch.manual_seed(num_tokens)
    weight = canonical(size, group_size, True, "cpu")
    repacked, rows, bias = (
        w4a8_layout.repack(weight),
        rows_of(num_tokens, weight, "cpu"),
        torch.randn(size[0]).bfloat16(),
    )
    out, plan = (
        torch.full((num_tokens, size[0]), float("nan")).bfloat16(),
        next(plans(num_tokens, size, tile, num_ctas)),
    )
    counters = torch.zeros(4 * plan.num_tiles, dtype=torch.int32)

    def emulate(
        name: str, defines: tuple[str, ...], params: cuda_stream.StreamW4A8Params, device: torch.device
    ) -> None:
        emulation.run("emulate_stream_w4a8.cc", defines, params, seed=num_tokens)

    monkeypatch.setattr(cuda_stream, "launch", emulate)
    monkeypatch.setattr(cuda_stream, "load", lambda source, defines: defines)
    monkeypatch.setattr(cuda_stream, "launches_dependently", lambda device: False)
    monkeypatch.setattr(cuda_stream, "copy_pace", lambda device: 0)
    sums = rows.activation_sums
    cuda_stream.stream_w4a8(rows, repacked, bias, out, plan, counters, activation_sums=sums)
    assert error_of(out, rows, numbers_of(weight, repacked, tile), bias) < MOST_ERROR
    assert not counters.any()


@needs_hopper
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("group_size", [64, 128, 0])
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_right_and_the_same_for_every_plan(size: tuple[int, int], group_size: int, tile: Tile) -> None:
    for has_zeros, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        weight = canonical(size, group_size, has_zeros, "cuda")
        repacked = w4a8_layout.repack(weight)
        numbers, bias = numbers_of(weight, repacked, tile), torch.randn(size[0], device="cuda").to(dtype)
        counters = torch.zeros(16 * max(size[0], 64), dtype=torch.int32, device="cuda")
        most_ctas = cuda_stream.count_ctas(GPU, dtype, repacked.scales.shape[2], tile)
        assert most_ctas > 0
        for num_tokens in (count for count in (5, 65, 80, 96, 112, 128, 150, 200, 256) if can_take(count, tile)):
            rows = rows_of(num_tokens, weight, "cuda")
            for plan in some_plans(num_tokens, size, tile, most_ctas):
                found = []
                for _ in range(2):
                    out = torch.full((num_tokens, size[0]), float("nan"), dtype=dtype, device="cuda")
                    sums = rows.activation_sums
                    cuda_stream.stream_w4a8(rows, repacked, bias, out, plan, counters, activation_sums=sums)
                    found.append(out)
                assert error_of(found[0], rows, numbers, bias) < MOST_ERROR, (num_tokens, plan)
                assert torch.equal(*found), f"{plan}: other bits"
                assert not counters.any(), f"{plan}: counters are left"


@needs_hopper
@pytest.mark.parametrize(
    "macro", ["LATE_PRODUCER=0", "LATE_PRODUCER=1", "MAX_WAIT_CLOCKS=0", "MAX_WAIT_CLOCKS=100000000"]
)
@pytest.mark.parametrize("tile", [Tile(128, 80, 1), Tile(192, 112, 1), Tile(192, 160, 0), Tile(128, 256, 0)], ids=str)
def test_order_of_events_does_not_matter(tile: Tile, macro: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that comes late to every stage; CTAs that never wait for others' sums, or almost for ever."""
    size, num_tokens = (1072, 1152), 75
    weight = canonical(size, 128, True, "cuda")
    repacked, rows = w4a8_layout.repack(weight), rows_of(num_tokens, weight, "cuda")
    counters = torch.zeros(16 * size[0], dtype=torch.int32, device="cuda")

    def multiply(plan: Plan) -> torch.Tensor:
        out = torch.full((num_tokens, size[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
        sums = rows.activation_sums
        cuda_stream.stream_w4a8(rows, repacked, None, out, plan, counters, activation_sums=sums)
        return out

    wanted = [(plan, multiply(plan)) for plan in some_plans(num_tokens, size, tile, 132)]
    defines = cuda_stream.defines
    monkeypatch.setattr(cuda_stream, "defines", lambda *kind: (*defines(*kind), f"SLIPSTREAM_{macro}"))
    for plan, expected in wanted:
        assert torch.equal(multiply(plan), expected), plan
        assert not counters.any()


@needs_hopper
@pytest.mark.parametrize(("num_tokens", "is_exact"), [(72, True), (128, True), (200, False), (256, False)])
def test_a_linear_layer_takes_it(num_tokens: int, is_exact: bool) -> None:
    weight = canonical((3584, 8192), 128, True, "cuda")
    repacked = ops.repack_int4(weight, for_fp8_rows=True)
    held = ops.int4_linear_weight(repacked, fp8_rows=True)
    assert variant_of(Product(held.kind, num_tokens, FP8_ROWS, torch.bfloat16, False)).kernel == "stream_w4a8"
    x = torch.randn(num_tokens, 8192, device="cuda", dtype=torch.bfloat16)
    rows = held.quant.cast(x)
    assert isinstance(rows, Fp8Rows)
    numbers = numbers_of(weight, repacked, (EXACT if is_exact else ROUNDED)[0])
    no_bias = torch.zeros(3584, device="cuda")
    assert error_of(ops.linear(rows, held), rows, numbers, no_bias) < MOST_ERROR
    assert held.counters is not None and not held.counters.any()


@pytest.mark.parametrize("tile", [Tile(128, 96, 1), Tile(128, 128, 1), Tile(128, 256, 0)], ids=str)
def test_compiles_well(tile: Tile) -> None:
    assert_compiles_well(cuda_stream.SOURCE, cuda_stream.defines(torch.bfloat16, 1, tile))
