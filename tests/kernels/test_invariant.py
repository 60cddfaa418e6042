"""Products and attention of deterministic mode: right, and a row the same to the bit whatever is computed with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import DecodeCase, chain_or_tree, make_case, oracle
from slipstream_kernels import ops
from slipstream_kernels.attention.triton import invariant_attention
from slipstream_kernels.gemm.triton import invariant_mm
from tolerances import ATTENTION

pytestmark = pytest.mark.usefixtures("products_of_equal_rows")
WEIGHTS = ("plain", "e4m3", "int8")
FP8 = torch.float8_e4m3fn


def draw_product(kind: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple:
    """x, weight, scales, bias of a product of (tokens, output features, input features)."""
    num_tokens, out_features, in_features = sizes
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator)
    scales = None if kind == "plain" else (0.5 + torch.rand(out_features, generator=generator)) * in_features**-0.5
    if kind == "int8":
        weight = (weight * 30).clamp(-127, 127).round().to(torch.int8)
        scales = scales / 30
    weight = (weight * in_features**-0.5).to(dtype) if kind == "plain" else weight.to(FP8) if kind == "e4m3" else weight
    bias = torch.randn(out_features, generator=generator).to(dtype)
    return tuple(None if tensor is None else tensor.to(device) for tensor in (x, weight, scales, bias))


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_right(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    x, weight, scales, bias = draw_product(kind, (19, 72, 160), dtype, device)
    expected = x.double() @ (weight.double() * (1 if scales is None else scales[:, None].double())).t() + bias.double()
    relative = 1e-5 if dtype == torch.float32 else 1e-2
    for backend in ("triton", "reference"):
        y = ops.invariant_mm(x, weight, scales, bias, backend=backend)
        torch.testing.assert_close(y.double(), expected, rtol=relative, atol=relative)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_parts_added_by_another_kernel_are_the_same_sum(
    device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = draw_product(kind, (5, 72, 1100), torch.bfloat16, device)
    found = []
    for splits in (False, True):
        monkeypatch.setattr(invariant_mm, "is_split", lambda *_, splits=splits: splits)
        found.append(ops.invariant_mm(*operands, backend="triton"))
    assert torch.equal(*found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's products depend on the tile's shape")
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(700, 4096, 4096), (300, 1000, 2112), (2100, 6144, 384), (130, 512, 14336)])
def test_a_row_is_the_same_in_any_company(sizes: tuple[int, int, int], dtype: torch.dtype, kind: str) -> None:
    x, weight, scales, bias = draw_product(kind, sizes, dtype, torch.device("cuda"))
    whole = ops.invariant_mm(x, weight, scales, bias)
    for first, last in ((0, 1), (3, 5), (1, 17), (20, 53), (0, 64), (7, 72), (5, 133), (17, 300)):
        part = ops.invariant_mm(x[first:last], weight, scales, bias)
        assert torch.equal(part, whole[first : first + len(part)]), f"rows {first} to {last}"


@pytest.mark.parametrize("field", ["weight", "scales", "bias"])
def test_product_refuses_what_does_not_fit(field: str) -> None:
    operands = dict(
        zip(("x", "weight", "scales", "bias"), draw_product("int8", (2, 8, 16), torch.float32, torch.device("cpu")))
    )
    operands[field] = operands[field][:-1].double()
    with pytest.raises(ValueError, match=field):
        ops.invariant_mm(**operands)


# heads and blocks, types, options; the interpreter takes a second for each test of one
WINDOW, NONE = {"sliding_window": 50}, {}
ALL = {
    "sliding_window": 90,
    "soft_cap": 3.0,
    "alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.004]),
    "sinks": torch.tensor([-1.0, 0.5, 2.0, 4.0]),
}
GEOMETRIES = [
    ((3, 1, 64, 32), torch.bfloat16, torch.int8, WINDOW),
    ((4, 2, 64, 32), torch.float32, None, ALL),
]
if torch.cuda.is_available():
    GEOMETRIES += [
        ((4, 2, 64, 32), torch.bfloat16, None, NONE),
        ((4, 1, 64, 32), torch.bfloat16, torch.int8, ALL),
        ((3, 1, 80, 64), torch.float16, torch.uint8, NONE),
        ((8, 2, 128, 64), torch.bfloat16, FP8, {"sliding_window": 70}),
        ((4, 4, 64, 16), torch.float32, torch.int8, NONE),
        ((32, 8, 128, 64), torch.bfloat16, None, NONE),
        ((2, 2, 256, 32), torch.bfloat16, None, {"sliding_window": 100}),
    ]


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of so few tokens that short sequences have several, of two lengths."""
    monkeypatch.setattr(invariant_attention, "FIRST_PART", 64)
    monkeypatch.setattr(invariant_attention, "PARTS_PER_LENGTH", 2)


def attend(case: DecodeCase, monkeypatch: pytest.MonkeyPatch, splits: bool, backend: str = "triton") -> torch.Tensor:
    monkeypatch.setattr(invariant_attention, "is_split", lambda *_: splits)
    longest = int(case.seq_lens.max())
    return ops.invariant_attention(*case.arguments(max_seq_len=longest), backend=backend)


def rows_of(case: DecodeCase, request: int, first: int, last: int) -> DecodeCase:
    """A request's query tokens first to last, as a step of their own in which the rest of its text is computed."""
    start, stop = case.query_start_loc[request : request + 2].tolist()
    end = int(case.seq_lens[request]) - (stop - start) + last
    return replace(
        case,
        q=case.q[start + first : start + last],
        block_tables=case.block_tables[request : request + 1],
        query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device=case.q.device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=case.q.device),
        max_query_len=last - first,
    )


@pytest.mark.parametrize("geometry, dtype, kv_dtype, options", GEOMETRIES)
def test_attention_is_right_and_the_same_in_chunks(
    device: torch.device,
    geometry: tuple,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    options: dict,
    monkeypatch: pytest.MonkeyPatch,
    short_parts: None,
) -> None:
    case = make_case([1, 20, 1], [150, 90, 0], geometry, dtype, kv_dtype)
    case = replace(case, options={**case.options, **options})
    expected = oracle(case)
    case = case.to(device)
    whole = attend(case, monkeypatch, splits=False)
    relative, absolute = ATTENTION[dtype]
    torch.testing.assert_close(whole.cpu().float(), expected.float(), rtol=relative, atol=absolute)
    assert torch.equal(whole, attend(case, monkeypatch, splits=True))
    for first, last, splits in ((0, 1, True), (3, 19, False)):
        part = attend(rows_of(case, 1, first, last), monkeypatch, splits)
        assert torch.equal(part, whole[1 + first : 1 + last]), f"rows {first} to {last}"


@pytest.mark.parametrize("geometry, dtype, kv_dtype, options", GEOMETRIES)
def test_a_row_of_a_tree_is_as_on_a_path_of_its_own(
    device: torch.device,
    geometry: tuple,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    options: dict,
    monkeypatch: pytest.MonkeyPatch,
    short_parts: None,
) -> None:
    case = chain_or_tree(make_case([6, 1], [110, 40], geometry, dtype, kv_dtype))
    case = replace(case, options={**case.options, **options})
    expected = oracle(case)
    case = case.to(device)
    drafted = attend(case, monkeypatch, splits=True)
    relative, absolute = ATTENTION[dtype]
    torch.testing.assert_close(drafted.cpu().float(), expected.float(), rtol=relative, atol=absolute)
    assert torch.equal(drafted, attend(case, monkeypatch, splits=False))
    for row in (3, 5):
        alone = attend(path_of(case, row, prefix=104), monkeypatch, splits=False)
        assert torch.equal(alone[0], drafted[row])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="long sequences take the interpreter minutes")
@pytest.mark.parametrize("kv_dtype", [None, FP8, torch.int8, torch.uint8])
def test_long_attention_is_the_same_alone_and_in_company(kv_dtype: torch.dtype | None) -> None:
    case = make_case([1, 300, 1, 64, 17], [9000, 5300, 700, 4100, 33], (32, 8, 128, 64), torch.bfloat16, kv_dtype)
    case = case.to(torch.device("cuda"))
    whole = ops.invariant_attention(*case.arguments(max_seq_len=9000))
    starts = case.query_start_loc.tolist()
    for request, start in enumerate(starts[:-1]):
        count = starts[request + 1] - start
        for first, last in ((0, 1), (0, count), (count // 2, count // 2 + 1), (count - 1, count)):
            part = rows_of(case, request, first, last)
            longest = int(part.seq_lens.max())
            for max_seq_len in (longest, 131072):
                found = ops.invariant_attention(*part.arguments(max_seq_len=max_seq_len))
                assert torch.equal(found, whole[start + first : start + last]), f"{request}: {first} to {last}"


def path_of(case: DecodeCase, row: int, prefix: int) -> DecodeCase:
    """A row of request 0 as a decode row: the keys and values on its path moved to where plain decoding has them."""
    options = {name: value for name, value in case.options.items() if name not in ("tree_mask", "positions")}
    mask = int(case.options["tree_mask"][row])
    path = [prefix + slot for slot in range(64) if mask >> slot & 1]
    table, size = case.block_tables[0].tolist(), case.key_cache.shape[2]
    caches = {"key_cache": case.key_cache.clone(), "value_cache": case.value_cache.clone()}
    if case.key_cache.dtype in (torch.int8, torch.uint8):
        options |= {name: options[name].clone() for name in ("key_scale", "value_scale")}
    moved = [*caches.values(), *(options[name] for name in ("key_scale", "value_scale") if caches and name in options)]
    for slot, source in enumerate(path, prefix):
        for tensor in moved:
            if tensor.dim() > 1:  # scales of heads stay
                tensor[table[slot // size], :, slot % size] = tensor[table[source // size], :, source % size].clone()
    alone = rows_of(replace(case, options=options, **caches), 0, row, row + 1)
    return replace(alone, seq_lens=torch.full_like(alone.seq_lens, prefix + len(path)))


def test_parts_are_cut_at_fixed_positions() -> None:
    assert [invariant_attention.count_parts(n) for n in (1, 512, 513, 4096, 4097, 5120, 5121)] == [1, 1, 2, 8, 9, 9, 10]
    assert invariant_attention.count_parts(131072) == 41


def test_attention_refuses_positions_without_a_tree_and_a_tree_without_positions() -> None:
    case = make_case([2], [5], (2, 1, 64, 16), torch.float32)
    for name in ("positions", "tree_mask"):
        with pytest.raises(ValueError, match="positions"):
            ops.invariant_attention(*case.arguments(**{name: torch.ones(2, dtype=torch.int64)}))
