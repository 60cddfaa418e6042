"""A decode step on a CPU is the reference's rope_write_kv and paged_attention of one row per request."""

from __future__ import annotations

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.attention.cpu.decode_step import CpuDecodeStep
from tolerances import ATTENTION

KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 3, 3, 32, 16
LENS = [1, 17, 64, 65, 200, 5, 300]


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rotary_dim", "interleaved", "norms_at", "window"),
    [
        (32, False, "", None),
        (16, True, "before", None),
        (32, False, "before", 40),
        (0, False, "", 7),
        (16, True, "after", 9),
    ],
)
def test_is_the_reference(
    dtype: torch.dtype, rotary_dim: int, interleaved: bool, norms_at: str, window: int | None
) -> None:
    torch.manual_seed(3)
    num_blocks = [-(-length // BLOCK_SIZE) for length in LENS]
    tables = torch.full((len(LENS), max(num_blocks)), -1, dtype=torch.int32)
    free = iter(torch.randperm(sum(num_blocks) + 1).tolist())
    for row, count in enumerate(num_blocks):
        tables[row, :count] = torch.tensor([next(free) for _ in range(count)])
    seq_lens = torch.tensor(LENS, dtype=torch.int32)
    positions = seq_lens.long() - 1
    last_blocks = tables[torch.arange(len(LENS)), positions // BLOCK_SIZE].long()
    slots = ops.TokenSlots(positions, last_blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
    shape = (sum(num_blocks) + 1, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    stored = [drawn(*shape, dtype=dtype) for _ in range(2)]
    for tensor in stored:  # what a former owner left behind the shortest request's key
        tensor[tables[0, 0], :, 1:] = torch.nan
    rope = ops.Rope(torch.randn(400, rotary_dim), interleaved) if rotary_dim else None
    weights = drawn(HEAD_DIM, dtype=dtype), drawn(HEAD_DIM, dtype=dtype)
    norms = ops.HeadNorms(*weights, 1e-5, norms_at == "after") if norms_at else None
    qkv = drawn(len(LENS), (GROUP + 2) * KV_HEADS, HEAD_DIM, dtype=dtype)
    q, k, v = qkv.split((GROUP * KV_HEADS, KV_HEADS, KV_HEADS), dim=1)

    expected_cache = ops.KvCache(*(tensor.clone() for tensor in stored))
    qk_rope = ops.QKRope(rope, norms)
    rotated = ops.rope_write_kv(q, k, v, slots, qk_rope, expected_cache, backend="reference")
    starts = torch.arange(len(LENS) + 1, dtype=torch.int32)
    metadata, options = ops.AttentionMetadata(tables, starts, seq_lens, 1, max(LENS)), ops.AttentionOptions(0.2, window)
    expected = ops.paged_attention(rotated, expected_cache, metadata, options, backend="reference")

    cache, step = ops.KvCache(*(tensor.clone() for tensor in stored)), CpuDecodeStep(slots, seq_lens, tables)
    found = step.rotate_and_store(q, k, v, qk_rope, cache)
    rtol, atol = ATTENTION[dtype]
    torch.testing.assert_close(found, rotated, rtol=rtol, atol=atol)
    torch.testing.assert_close(cache.key, expected_cache.key, rtol=rtol, atol=atol, equal_nan=True)
    assert torch.equal(cache.value.nan_to_num(9.0), expected_cache.value.nan_to_num(9.0))
    out = step.attend(rotated, expected_cache, options)
    assert out.dtype == dtype and out.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
    alone = CpuDecodeStep(ops.TokenSlots(positions[4:5], slots.slot_mapping[4:5]), seq_lens[4:5], tables[4:5])
    torch.testing.assert_close(
        alone.attend(rotated[4:5].contiguous(), expected_cache, options)[0], out[4], rtol=rtol, atol=atol
    )
