"""Kernels of multi-head latent attention: writing and gathering latents, absorbed and un-absorbed attention, merging.

References are compared with fp64 on the host, Triton-lang with the same; the two forms of attention with each other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from latent_cases import dense_latent_attention, make_latent_case, make_rope, starts_of
from ragged_cases import dense_ragged, ragged_case
from slipstream_kernels import ops
from slipstream_kernels.attention.triton import latent_attention as triton_latent
from slipstream_kernels.kv.reference.gather_latent import slots_of
from slipstream_kernels.kv.reference.write_latent import read_latents
from slipstream_kernels.kv_cache import FP8_DTYPE
from slipstream_kernels.triton.interpreter import padded_width
from tolerances import ATTENTION, ELEMENTWISE

BACKENDS = ["reference", "triton"]
# prompt chunk, drafts, decode, a padding request and one without rows together
MIXED = ([5, 1, 3, 1, 0], [40, 17, 33, 0, 9])


def attend(case, backend: str, scale: float = 0.1) -> torch.Tensor:
    return ops.latent_attention(*case.arguments(), scale=scale, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_fp8", [False, True], ids=["plain", "fp8"])
def test_latent_attention_is_right(device, backend, dtype, is_fp8) -> None:
    case = make_latent_case(*MIXED, dtype=dtype, is_fp8=is_fp8, device=device)
    rtol, atol = ATTENTION[dtype]
    torch.testing.assert_close(
        attend(case, backend).double().cpu(), dense_latent_attention(case, 0.1), rtol=rtol, atol=atol
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_odd_sizes_and_many_heads(device, backend) -> None:
    rtol, atol = ATTENTION[torch.float32]
    for sizes, has_tree in (((3, 128, 16, 16), True), ((20, 40, 12, 32), True), ((33, 24, 8, 16), False)):
        case = make_latent_case([9, 1, 4], [30, 20, 4], sizes=sizes, has_tree=has_tree, device=device)
        expected = dense_latent_attention(case, 0.1)
        torch.testing.assert_close(attend(case, backend).double().cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("has_tree", [False, True], ids=["chain", "tree"])
def test_split_keys_merge_to_the_same(device, monkeypatch, has_tree) -> None:
    case = make_latent_case([1, 6, 1, 1], [70, 33, 3, 0], has_tree=has_tree, device=device)
    expected = dense_latent_attention(case, 0.1)
    rtol, atol = ATTENTION[torch.float32]
    for num_splits in (2, 8):
        monkeypatch.setattr(triton_latent, "_num_splits", lambda *_, splits=num_splits: splits)
        torch.testing.assert_close(attend(case, "triton").double().cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("is_fp8", "interleaved"), [(False, False), (False, True), (True, True)], ids=str)
def test_written_latents_are_normed_rotated_and_gathered(device, backend, is_fp8, interleaved) -> None:
    """Queries rotate in place; slot -1 writes nothing; gathered rows are those of each request's range."""
    torch.manual_seed(0)
    dtype, rank, rope_dim, block_size = torch.float32, 256, 16, 16
    cache = ops.empty_latent_cache(6, block_size, rank, rope_dim, FP8_DTYPE if is_fp8 else dtype, device)
    rope, weight = (
        replace(make_rope(rope_dim, device), interleaved=interleaved),
        (1 + 0.3 * torch.randn(rank)).to(device, dtype),
    )
    projected = torch.randn(21, 3 * 24 + rank + rope_dim).to(device, dtype)
    q, latent = projected[:, : 3 * 24].unflatten(1, (3, 24)), projected[:, 3 * 24 :]
    table = torch.tensor([4, 2, -1, 5], dtype=torch.int32, device=device)
    positions = torch.arange(7, 28, device=device)
    slots = table.long()[torch.arange(21, device=device) // block_size] * block_size
    slots = slots + torch.arange(21, device=device) % block_size
    slots[3] = -1
    cos, sin = rope.cos_sin[positions].double().cpu().chunk(2, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x = x.double().cpu()
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)

    keys, queries = rotated(latent[:, rank:]), torch.stack([rotated(q[:, head, 8:]) for head in range(3)], dim=1)
    wide = latent[:, :rank].double().cpu()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double().cpu()
    untouched = q[..., :8].clone()
    latents = ops.StepLatents(latent, ops.TokenSlots(positions, slots), rope, weight, 1e-6)
    ops.write_latent(q[..., 8:], latents, cache, q[..., 8:], backend=backend)
    assert torch.equal(q[..., :8], untouched)
    rtol, atol = ELEMENTWISE[dtype]
    torch.testing.assert_close(q[..., 8:].double().cpu(), queries, rtol=rtol, atol=atol)
    assert not read_latents(cache, torch.tensor([4 * block_size + 3], device=device)).any()
    starts = torch.tensor([0, 6, 12], dtype=torch.int32, device=device)
    first, lens = (torch.tensor(pair, dtype=torch.int32, device=device) for pair in ([14, 4], [4, 6]))
    out = torch.full((12, rank + rope_dim), float("nan"), dtype=dtype, device=device)
    ranges = ops.TokenRanges(table[None].repeat(2, 1), first, lens, starts)
    ops.gather_latent(cache, ranges, out, backend=backend)
    rows = torch.tensor([14, 15, 16, 17, 4, 5, 6, 7, 8, 9])
    found = torch.cat([out[:4], out[6:]]).double().cpu()
    close = {"rtol": 0.07, "atol": 0.01} if is_fp8 else {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(found, torch.cat([normed, keys], dim=1)[rows], **close)
    assert not out[4:6].any()


def test_both_versions_write_the_same_fp8_row(device) -> None:
    """512 e4m3 values and 4 scales to the bit, and 64 bf16 features, in 656 bytes; a group of zeros stays zero."""
    torch.manual_seed(1)
    rope, latent = make_rope(64, device), torch.randn(3, 576).to(device)
    latent[1, :128] = 0
    weight, numbers, caches = torch.ones(512, device=device), torch.arange(3, device=device), []
    latents = ops.StepLatents(latent, ops.TokenSlots(numbers, numbers), rope, weight, 1e-6)
    for backend in BACKENDS:
        cache = ops.empty_latent_cache(1, 64, 512, 64, FP8_DTYPE, device)
        assert cache.rows.shape == (1, 1, 64, 656)
        q = torch.zeros(3, 1, 64, device=device)
        ops.write_latent(q, latents, cache, q, backend=backend)
        caches.append(cache)
    first, second = caches
    num_equal = (first.values.view(torch.uint8) == second.values.view(torch.uint8))[:3].float().mean()
    assert num_equal > 0.99  # the sums of squares are added in another order
    torch.testing.assert_close(first.scales[:3], second.scales[:3], rtol=1e-5, atol=0)
    torch.testing.assert_close(first.rope[:3], second.rope[:3], rtol=1.6e-2, atol=1e-2)
    assert not read_latents(second, numbers)[1, :128].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ragged_attention_is_right(device, backend, dtype) -> None:
    rtol, atol = ATTENTION[dtype]
    for is_causal, key_lens in ((True, [70, 9, 1]), (False, [40, 0, 100])):
        case = ragged_case([70, 9, 1], key_lens, dtype, device, is_causal=is_causal)
        out, lse = ops.ragged_attention(*case, scale=0.2, backend=backend)
        expected = dense_ragged(case)
        torch.testing.assert_close(out.double().cpu(), expected[0], rtol=rtol, atol=atol)
        torch.testing.assert_close(lse.double().cpu(), expected[1], rtol=rtol, atol=atol)


@pytest.mark.parametrize("sizes", [(128, 64, 128), (192, 64, 256)], ids=str)
def test_published_sizes_of_heads(device, sizes) -> None:
    """DeepSeek's and GLM-4.7-Flash's heads, in more tokens than one tile has rows."""
    rtol, atol = ATTENTION[torch.bfloat16]
    for is_causal, query_lens, key_lens in ((True, [150, 5], [150, 90]), (False, [130, 2], [70, 200])):
        case = ragged_case(query_lens, key_lens, torch.bfloat16, device, sizes, is_causal=is_causal)
        out, lse = ops.ragged_attention(*case, scale=0.2, backend="triton")
        expected = dense_ragged(case)
        torch.testing.assert_close(out.double().cpu(), expected[0], rtol=rtol, atol=atol)
        torch.testing.assert_close(lse.double().cpu(), expected[1], rtol=rtol, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_the_keys_merge_to_the_whole(device, backend) -> None:
    """A prompt's chunk: its own keys causally, those before it in two pieces, merged as the pieces come."""
    whole = ragged_case([6], [31], torch.float32, device)
    expected = dense_ragged(whole)
    q, keys, metadata = whole

    def over(part: slice, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        lens = torch.tensor([part.stop - part.start], dtype=torch.int32, device=device)
        own = replace(metadata, key_start_loc=starts_of(lens.tolist(), device), key_lens=lens, is_causal=is_causal)
        some = ops.RaggedKeys(keys.k[part], keys.k_rope[part], keys.v[part])
        return ops.ragged_attention(q, some, own, scale=0.2, backend=backend)

    out, lse = over(slice(25, 31), True)
    empty = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for other in (over(slice(0, 16), False), empty, over(slice(16, 25), False)):
        ops.merge_attention(out, lse, *other, backend=backend)
    rtol, atol = ATTENTION[torch.float32]
    torch.testing.assert_close(out.double().cpu(), expected[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.double().cpu(), expected[1], rtol=rtol, atol=atol)


def test_absorbed_is_unabsorbed(device) -> None:
    """The two forms of one layer: W_UK and W_UV in the queries and the result, or in keys and values."""
    torch.manual_seed(3)
    case = make_latent_case([12], [12], sizes=(3, 128, 16, 16), device=device)
    nope, value_dim, rank = 24, 20, 128
    q = torch.randn(12, 3, nope + 16).to(device)
    kv_b = torch.randn(3, nope + value_dim, rank).to(device) * rank**-0.5
    absorbed = torch.cat([torch.einsum("thn,hnr->thr", q[..., :nope], kv_b[:, :nope]), q[..., nope:]], dim=-1)
    latent = ops.latent_attention(absorbed, *case.arguments()[1:], scale=0.2, backend="triton")
    latents = read_latents(case.cache, slots_of(case.block_tables[0], 0, 12, 16))
    both = torch.einsum("tr,hnr->thn", latents[:, :rank], kv_b)
    lens = torch.tensor([12], dtype=torch.int32, device=device)
    keys = ops.RaggedKeys(both[..., :nope], latents[:, rank:], both[..., nope:])
    metadata = ops.RaggedMetadata(case.query_start_loc, case.query_start_loc, lens, 12, 12, is_causal=True)
    out, _ = ops.ragged_attention(q, keys, metadata, scale=0.2, backend="triton")
    torch.testing.assert_close(torch.einsum("thr,hvr->thv", latent, kv_b[:, nope:]), out, rtol=1e-4, atol=1e-5)


def test_widths_are_padded_to_what_a_compiled_product_takes() -> None:
    assert [padded_width(num_features) for num_features in (8, 16, 24, 512)] == [16, 16, 32, 512]


def test_refusals_name_what_is_wrong(device) -> None:
    case = make_latent_case([2], [20], device=device)
    with pytest.raises(ValueError, match="q: shape"):
        ops.latent_attention(case.q[..., 1:], *case.arguments()[1:], scale=1.0)
    with pytest.raises(ValueError, match="tree_mask"):
        ops.latent_attention(*case.arguments(tree_mask=case.seq_lens), scale=1.0)
    with pytest.raises(ValueError, match="cache: dtype"):
        ops.latent_attention(case.q.bfloat16(), *case.arguments()[1:], scale=1.0)
    with pytest.raises(ValueError, match="multiple of 128"):
        ops.empty_latent_cache(1, 16, 100, 16, FP8_DTYPE, device)
