"""Products of many 16-bit rows with 4-bit weights, expanded beside the tensor cores: right however they are cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import int4_emulator
import pytest
import torch
from hopper import assert_compiles_well, needs_hopper
from slipstream_kernels import ops
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.choose import variant_of
from slipstream_kernels.gemm.cuda import stream_w4a16 as cuda_stream
from slipstream_kernels.gemm.cuda import stream_w4a16_choice
from slipstream_kernels.gemm.cuda.stream_plan import COUNTER_ROWS, MAX_UNITS, Plan
from slipstream_kernels.gemm.cuda.stream_w4a16_choice import COLUMNS, plans
from slipstream_kernels.gemm.product import PLAIN_ROWS, Product
from slipstream_kernels.integer import Int4Weight
from stream_cases import assert_chain_in_a_graph_is_right

# us of one H200 by plan (columns, tiles, CTAs, tiles of tokens): each product after itself, cold weights
TIMES = json.loads((Path(__file__).parents[1] / "golden" / "stream_w4a16_times.json").read_text())
LOSS, TOTAL_LOSS = 1.13, 1.01  # of the fastest, in one cell and in all
SHAPES = [(1072, 1152), (2048, 4096), (384, 14336), (16, 128)]  # tiles of 7 and 8 units, many chunks, one unit
TOKENS: dict[int, tuple[int, ...]] = {128: (5, 128, 300), 160: (150,), 192: (190, 384), 224: (200,), 256: (256, 700)}
GPU = torch.device("cuda:0")


def canonical(size: tuple[int, int], group_size: int, device: str) -> Int4Weight:
    """Random codes, scales and zero points; group_size 0: one group a row."""
    out_features, in_features = size
    packed = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    num_groups = in_features // (group_size or in_features)
    scales = (0.5 + torch.rand(out_features, num_groups, device=device)) * in_features**-0.5 / 4
    zeros = torch.randint(17, scales.shape, dtype=torch.uint8, device=device)
    return Int4Weight(packed, scales, zeros, group_size or in_features, out_features, in_features)


def counters_of(size: tuple[int, int]) -> torch.Tensor:
    """Enough for any plan."""
    return torch.zeros(4 * 4 * size[0], dtype=torch.int32, device="cuda")


def some_plans(num_tokens: int, size: tuple[int, int], columns: int, most_ctas: int) -> Iterator[Plan]:
    """Those of the choice, and others: runs that end inside of tiles, whole tiles, one CTA for all."""
    chosen = list(plans(num_tokens, size, columns, most_ctas))
    chunks, token_tiles = size[1] // 128, -(-num_tokens // columns)
    num_tiles = token_tiles * -(-size[0] // 16 // MAX_UNITS)
    forced = [Plan(columns, num_tiles, min(ctas, num_tiles * chunks), token_tiles) for ctas in (1, 7, 77, num_tiles)]
    yield from dict.fromkeys([*chosen, *forced])


def test_nibbles_stand_in_order() -> None:
    """expand_in_order: pair i has nibbles 2 i and 2 i + 1, which int4_layout gives to neighbouring features."""
    codes = torch.randint(16, (16, 128), dtype=torch.uint8)
    words = int4_layout.pack_qweight(codes[:, 0::2] | codes[:, 1::2] << 4).view(4, 32, 2).long() & 0xFFFFFFFF
    found = torch.full((16, 128), -1)
    lanes = torch.arange(32)
    for quarter, half in itertools.product(range(4), range(2)):  # of 32 features; of 8 rows
        pairs = int4_emulator.pair_neighbours(words[quarter, :, half], 0x4300)
        for i, e in itertools.product(range(4), range(2)):
            column = 32 * quarter + 16 * (i // 2) + 4 * (lanes % 4) + 2 * (i % 2) + e
            found[lanes // 4 + 8 * half, column] = (pairs[i] >> 16 * e & 0xFFFF) - 0x4300
    assert torch.equal(found, codes.long())


def test_plans_can_run() -> None:
    """As `fits` of sm90_stream_w4a16.cu, with the counters that a weight comes with and the memory that is planned."""
    shapes = itertools.product((16, 144, 3584, 10240, 57344), (128, 4096, 28672))
    for size, num_sms, columns in itertools.product(shapes, (1, 16, 78, 114, 132), COLUMNS):
        for num_tokens in (1, 65, 200, 513, 1024):
            units, chunks = size[0] // 16, size[1] // 128
            for plan in plans(num_tokens, size, columns, num_sms):
                of_rows = plan.num_tiles // plan.token_tiles
                assert plan.num_tiles % plan.token_tiles == 0 and plan.token_tiles * columns >= num_tokens
                assert of_rows <= units and -(-units // of_rows) <= MAX_UNITS
                assert 1 <= plan.num_ctas <= min(num_sms, plan.num_tiles * chunks)
                assert (plan.num_tiles * chunks + 1) * (plan.num_ctas + 1) < 1 << 32
                assert not plan.is_split or 4 * plan.num_tiles <= size[0] // COUNTER_ROWS
                assert 2 * 4 * plan.num_ctas * plan.slot_floats <= ops.w4a16_sums_bytes(num_sms)


def test_rows_are_not_multiplied_in_vain() -> None:
    """The tile that is chosen leaves less than a third of its tokens empty, but for the smallest tile."""
    for size, num_tokens in itertools.product(((4096, 4096), (28672, 4096), (4096, 14336)), (129, 161, 200, 300, 600)):
        plan = stream_w4a16_choice.choose(num_tokens, size, lambda columns: 132)
        assert plan is not None and plan.columns * plan.token_tiles < 1.5 * num_tokens
    assert stream_w4a16_choice.choose(200, (4096, 4096), lambda columns: 0) is None


def test_the_fastest_plan_that_was_measured_is_chosen() -> None:
    taken, least = 0.0, 0.0
    for cell in TIMES:
        size = cell["out_features"], cell["in_features"]
        plan = stream_w4a16_choice.choose(cell["num_tokens"], size, lambda columns: 132)
        assert plan is not None
        us = cell["us"]["/".join(map(str, plan))]
        assert us <= LOSS * min(cell["us"].values()), (cell, plan)
        taken, least = taken + us, least + min(cell["us"].values())
    assert taken <= TOTAL_LOSS * least


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [64, 128, 0])
@pytest.mark.parametrize("size", SHAPES)
def test_right_and_the_same_for_every_plan(size: tuple[int, int], group_size: int, dtype: torch.dtype) -> None:
    weight = int4_layout.repack(canonical(size, group_size, "cuda"))
    dense = ops.dequantize_int4(int4_layout.canonical(weight)).double()
    counters, bias = counters_of(size), torch.randn(size[0], device="cuda").to(dtype)
    groups = int4_layout.groups_per_block(weight.group_size)
    for columns, num_tokens in ((columns, tokens) for columns, counts in TOKENS.items() for tokens in counts):
        x = torch.randn(num_tokens, size[1] + 8, device="cuda").to(dtype)[:, : size[1]]  # rows that are not dense
        expected = x.double() @ dense.t() + bias.double()
        for plan in some_plans(num_tokens, size, columns, cuda_stream.count_ctas(GPU, dtype, groups, columns)):
            torch.full(expected.shape, float("nan"), dtype=dtype, device="cuda")  # the memory of the next result
            y = cuda_stream.stream_w4a16(x, weight, bias, plan, counters)
            error = (y.double() - expected).norm() / expected.norm()
            assert error < (5e-3 if dtype == torch.bfloat16 else 3e-3), (plan, error)
            assert torch.equal(cuda_stream.stream_w4a16(x, weight, bias, plan, counters), y), f"{plan}: other bits"
            assert not counters.any(), f"{plan}: counters are left"


@needs_hopper
@pytest.mark.parametrize("num_ctas", [1, 3, 7])
def test_codes_are_not_overwritten_while_they_are_read(num_ctas: int) -> None:
    """Stages that were given back as their loads were issued, not done, gave other sums in one of 300 launches."""
    size, num_tokens = (1072, 1152), 128
    weight, counters = int4_layout.repack(canonical(size, 128, "cuda")), counters_of(size)
    x = torch.randn(num_tokens, size[1], device="cuda", dtype=torch.bfloat16)
    plan = Plan(128, 9, num_ctas)
    expected = cuda_stream.stream_w4a16(x, weight, None, plan, counters)
    same = [cuda_stream.stream_w4a16(x, weight, None, plan, counters).eq(expected).all() for _ in range(3000)]
    assert torch.stack(same).all()


@needs_hopper
@pytest.mark.parametrize(
    "macro", ["LATE_PRODUCER=0", "LATE_PRODUCER=1", "MAX_WAIT_CLOCKS=0", "MAX_WAIT_CLOCKS=100000000"]
)
@pytest.mark.parametrize("columns", [128, 256])
def test_order_of_events_does_not_matter(columns: int, macro: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that comes late to every stage; CTAs that never wait for others' sums, or almost for ever."""
    size, num_tokens = (1072, 1152), 150
    weight, counters = int4_layout.repack(canonical(size, 128, "cuda")), counters_of(size)
    x = torch.randn(num_tokens, size[1], device="cuda", dtype=torch.bfloat16)
    found = some_plans(num_tokens, size, columns, 132)
    wanted = [(plan, cuda_stream.stream_w4a16(x, weight, None, plan, counters)) for plan in found]
    defines = cuda_stream.defines
    monkeypatch.setattr(cuda_stream, "defines", lambda *kind: (*defines(*kind), f"SLIPSTREAM_{macro}"))
    for plan, expected in wanted:
        assert torch.equal(cuda_stream.stream_w4a16(x, weight, None, plan, counters), expected), plan
        assert not counters.any()


@needs_hopper
def test_a_chain_in_a_graph_sees_what_the_kernel_before_wrote() -> None:
    held: dict[int, tuple[Int4Weight, torch.Tensor]] = {}

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.data_ptr() not in held:
            repacked = int4_layout.repack(ops.quantize_int4(weight, 128))
            held[weight.data_ptr()] = repacked, counters_of((1024, 1024))
            torch.cuda.synchronize()  # a product reads weights before the kernel before it has ended
        codes, counters = held[weight.data_ptr()]
        return cuda_stream.stream_w4a16(x, codes, None, Plan(128, 8, 60), counters)

    assert_chain_in_a_graph_is_right(multiply, num_tokens=40, features=1024)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [100, 200, 1024])
def test_a_linear_layer_takes_it(num_tokens: int) -> None:
    weight = canonical((4096, 4096), 128, "cuda")
    held = ops.int4_linear_weight(ops.repack_int4(weight))
    variant = variant_of(Product(held.kind, num_tokens, PLAIN_ROWS, torch.bfloat16, False))
    assert variant.kernel == "stream_w4a16"
    x = torch.randn(num_tokens, 4096, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ ops.dequantize_int4(weight).double().t()
    assert (ops.linear(x, held).double() - expected).norm() < 5e-3 * expected.norm()
    assert held.counters is not None and not held.counters.any()


def test_compiles_well() -> None:
    assert_compiles_well(cuda_stream.SOURCE, cuda_stream.defines(torch.bfloat16, 2, 160))
