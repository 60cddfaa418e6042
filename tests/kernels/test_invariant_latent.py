"""Deterministic mode's latent attention: right, and a row the same to the bit whatever is computed with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from latent_cases import LatentCase, dense_latent_attention, make_latent_case
from slipstream_kernels import ops
from slipstream_kernels.attention.triton import invariant_attention
from slipstream_kernels.attention.triton import invariant_latent_attention as triton_latent
from tolerances import ATTENTION, SCALED_MM

pytestmark = pytest.mark.usefixtures("products_of_equal_rows")
SCALE = 0.1
# (heads, rank, rope features, block size), dtype, whether rows are FP8. 3 heads leave rows of a tile of 64 unused;
# 72 heads are two groups of 36.
CASES = [
    ((3, 128, 16, 16), torch.bfloat16, True),
    ((5, 40, 8, 32), torch.float32, False),
]
if torch.cuda.is_available():
    CASES += [
        ((16, 512, 64, 64), torch.bfloat16, False),
        ((128, 512, 64, 64), torch.bfloat16, True),
        ((20, 512, 64, 32), torch.float16, False),
        ((72, 512, 64, 16), torch.bfloat16, False),
    ]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of so few tokens that short sequences have several, of two lengths."""
    monkeypatch.setattr(triton_latent, "FIRST_PART", 32)
    monkeypatch.setattr(triton_latent, "PARTS_PER_LENGTH", 2)


def attend(case: LatentCase, monkeypatch: pytest.MonkeyPatch, splits: bool, backend: str = "triton") -> torch.Tensor:
    positions = None if case.tree_mask is None else positions_of(case)
    monkeypatch.setattr(triton_latent, "is_split", lambda *_: splits)
    monkeypatch.setattr(triton_latent, "count_parts", lambda length: -(-length // 32))
    return ops.invariant_latent_attention(*case.arguments(positions=positions), scale=SCALE, backend=backend)


def positions_of(case: LatentCase) -> torch.Tensor:
    """Positions of the rows of a tree: a row has one key before it for each row on its path."""
    assert case.tree_mask is not None
    prefixes = (case.seq_lens - case.query_start_loc.diff()).repeat_interleave(case.query_start_loc.diff()).long()
    depths = torch.tensor([int(mask).bit_count() - 1 for mask in case.tree_mask.tolist()], device=prefixes.device)
    return prefixes + depths


def rows_of(case: LatentCase, request: int, first: int, last: int) -> LatentCase:
    """A request's query tokens first to last, as a step of their own in which the rest of its text is computed."""
    start, stop = case.query_start_loc[request : request + 2].tolist()
    end = int(case.seq_lens[request]) - (stop - start) + last
    device = case.q.device
    return replace(
        case,
        q=case.q[start + first : start + last],
        block_tables=case.block_tables[request : request + 1],
        query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
        tree_mask=None,
    )


@pytest.mark.parametrize(("sizes", "dtype", "is_fp8"), CASES, ids=str)
def test_it_is_right_and_the_same_in_chunks(
    device: torch.device, sizes: tuple, dtype: torch.dtype, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode, a prompt behind cached tokens, a padding request."""
    case = make_latent_case([1, 12, 1], [75, 90, 0], sizes=sizes, dtype=dtype, is_fp8=is_fp8, device=device)
    whole = attend(case, monkeypatch, splits=False)
    rtol, atol = ATTENTION[dtype]
    expected = dense_latent_attention(case, SCALE)
    for found in (whole, attend(case, monkeypatch, False, "reference")):
        torch.testing.assert_close(found.double().cpu(), expected, rtol=rtol, atol=atol)
    assert torch.equal(whole, attend(case, monkeypatch, splits=True))
    for first, last, splits in ((0, 1, True), (2, 11, False)):
        part = attend(rows_of(case, 1, first, last), monkeypatch, splits)
        assert torch.equal(part, whole[1 + first : 1 + last]), f"rows {first} to {last}"


@pytest.mark.parametrize(("sizes", "dtype", "is_fp8"), CASES, ids=str)
def test_a_row_of_a_tree_is_as_on_a_path_of_its_own(
    device: torch.device, sizes: tuple, dtype: torch.dtype, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_latent_case([6, 1], [70, 40], sizes=sizes, dtype=dtype, is_fp8=is_fp8, has_tree=True, device=device)
    drafted = attend(case, monkeypatch, splits=True)
    rtol, atol = ATTENTION[dtype]
    torch.testing.assert_close(drafted.double().cpu(), dense_latent_attention(case, SCALE), rtol=rtol, atol=atol)
    assert torch.equal(drafted, attend(case, monkeypatch, splits=False))
    for row in (3, 5):
        assert torch.equal(attend(path_of(case, row, prefix=64), monkeypatch, splits=False)[0], drafted[row])


def path_of(case: LatentCase, row: int, prefix: int) -> LatentCase:
    """A row of request 0 as a decode row: the latents on its path moved to where plain decoding has them."""
    assert case.tree_mask is not None
    mask, rows = int(case.tree_mask[row]), case.cache.rows.clone()
    path = [prefix + slot for slot in range(64) if mask >> slot & 1]
    table, size = case.block_tables[0].tolist(), case.cache.block_size
    for slot, source in enumerate(path, prefix):
        rows[table[slot // size], :, slot % size] = rows[table[source // size], :, source % size].clone()
    alone = rows_of(replace(case, cache=replace(case.cache, rows=rows)), 0, row, row + 1)
    return replace(alone, seq_lens=torch.full_like(alone.seq_lens, prefix + len(path)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="long sequences take the interpreter minutes")
@pytest.mark.parametrize("is_fp8", [False, True], ids=["plain", "fp8"])
def test_long_attention_is_the_same_alone_and_in_company(is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    device, longest = torch.device("cuda"), 9000
    sizes = (128, 512, 64, 64)
    case = make_latent_case(
        [1, 130, 1, 17], [longest, 5300, 700, 33], sizes=sizes, dtype=torch.bfloat16, is_fp8=is_fp8, device=device
    )

    def run(part: LatentCase, bound: int) -> torch.Tensor:
        return ops.invariant_latent_attention(*part.arguments(max_seq_len=bound), scale=SCALE)

    whole, starts = run(case, longest), case.query_start_loc.tolist()
    for request, start in enumerate(starts[:-1]):
        count = starts[request + 1] - start
        for first, last in ((0, 1), (0, count), (count // 2, count // 2 + 1), (count - 1, count)):
            part = rows_of(case, request, first, last)
            for bound in (int(part.seq_lens.max()), 131072):
                assert torch.equal(run(part, bound), whole[start + first : start + last]), (request, first, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["values", "keys"])
def test_each_heads_product(device: torch.device, dtype: torch.dtype, is_transposed: bool) -> None:
    """Right into a part of a wider row, and the same for a token alone, in tiles of 16 and of 64 tokens."""
    torch.manual_seed(1)
    num_heads, out_features, in_features = 3, 40, 72
    drawn = torch.randn(num_heads, 2 * out_features, in_features).to(dtype) * in_features**-0.5
    weight = drawn[:, :out_features].to(device)
    if is_transposed:
        weight = drawn[:, :out_features].transpose(1, 2).contiguous().to(device).transpose(1, 2)
    x = torch.randn(40, num_heads, in_features + 8).to(device, dtype)[..., :in_features]

    def product(tokens: slice, backend: str = "triton") -> torch.Tensor:
        rows = x[tokens]
        wide = torch.full((len(rows), num_heads, out_features + 8), 7.0, dtype=dtype, device=device)
        ops.invariant_head_mm(rows, weight, wide[..., :out_features], backend=backend)
        assert (wide[..., out_features:] == 7).all()
        return wide[..., :out_features]

    whole = product(slice(0, 40))
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    rtol, atol = SCALED_MM[device.type, dtype]
    for found in (whole, product(slice(0, 40), "reference")):
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=10 * atol)
    for first, last in ((0, 1), (7, 12), (20, 40)):
        assert torch.equal(product(slice(first, last)), whole[first:last])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large products take the interpreter minutes")
@pytest.mark.parametrize("sizes", [(128, 512, 128), (128, 128, 512), (20, 512, 192)], ids=str)
def test_each_heads_product_of_published_sizes(sizes: tuple[int, int, int]) -> None:
    num_heads, out_features, in_features = sizes
    weight = torch.randn(num_heads, in_features, out_features, device="cuda").bfloat16().transpose(1, 2)
    x = torch.randn(700, num_heads, in_features, device="cuda").bfloat16()
    whole = ops.invariant_head_mm(x, weight, x.new_empty(700, num_heads, out_features))
    for first, last in ((0, 1), (3, 20), (5, 133), (17, 700)):
        part = ops.invariant_head_mm(x[first:last], weight, x.new_empty(last - first, num_heads, out_features))
        assert torch.equal(part, whole[first:last])


def test_long_contexts_of_some_requests_are_split() -> None:
    """Of DeepSeek-V3: 48 requests in a graph for 128k tokens, on a GPU of 132 SMs; a prompt fills the GPU itself."""
    num_parts, head_bytes = invariant_attention.count_parts(1 << 17), triton_latent.PARTIAL_BYTES
    for num_tokens, expected in ((1, True), (48, True), (4096, False)):
        sizes = 2 * num_tokens, num_tokens * 128 * 512, num_parts, 132
        assert invariant_attention.is_split(*sizes, 128 * head_bytes) is expected
    assert not invariant_attention.is_split(2, 64 * 512, 1, 132)


def test_heads_of_a_tile() -> None:
    assert [triton_latent.heads_of_a_tile(heads, 64) for heads in (1, 16, 20, 64, 72, 128, 67)] == [
        1, 16, 20, 64, 36, 64, 1,
    ]  # fmt: skip


def test_what_does_not_fit_is_named() -> None:
    device = torch.device("cpu")
    case = make_latent_case([2], [20], has_tree=True, device=device)
    with pytest.raises(ValueError, match="positions: goes with tree_mask"):
        ops.invariant_latent_attention(*case.arguments(), scale=1.0)
    with pytest.raises(ValueError, match="positions: goes with tree_mask"):
        ops.invariant_latent_attention(*case.arguments(tree_mask=None, positions=case.tree_mask), scale=1.0)
    with pytest.raises(ValueError, match="q: shape"):
        ops.invariant_latent_attention(case.q[..., 1:], *case.arguments()[1:], scale=1.0)
    x, weight, out = torch.zeros(2, 3, 8), torch.zeros(3, 4, 8), torch.zeros(2, 3, 4)
    for named, arguments in {
        "x: shape": (x[:, :2], weight, out),
        "out: shape": (x, weight, out[..., 1:]),
        "weight: dtype": (x, weight.half(), out),
        "weight: strides": (x, torch.zeros(3, 8, 16)[:, ::2, ::2], out),
    }.items():
        with pytest.raises(ValueError, match=named):
            ops.invariant_head_mm(*arguments)
