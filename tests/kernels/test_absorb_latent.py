"""absorb_latent: what write_latent and head_mm give, in one launch for few tokens."""

from __future__ import annotations

import pytest
import torch
from latent_cases import make_rope
from slipstream_kernels import ops
from slipstream_kernels.kv_cache import FP8_DTYPE

BACKENDS = ["reference", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16 rows", "FP8 rows"])
@pytest.mark.parametrize("sizes", [(1, 3, 24), (7, 16, 128), (21, 5, 40)], ids=str)
def test_both_parts(device: torch.device, sizes: tuple[int, int, int], is_fp8: bool, backend: str) -> None:
    """To the bit: the same tiles are multiplied, and the same rows written; rows without a slot are not."""
    torch.manual_seed(1)
    num_tokens, num_heads, nope_dim = sizes
    rank, rope_dim = (512, 64) if is_fp8 else (32, 16)
    rope = make_rope(rope_dim, device)
    q = torch.randn(num_tokens, num_heads, nope_dim + rope_dim + 8, device=device).bfloat16()[..., 8:]
    keys = torch.randn(num_heads, nope_dim + 4, rank, device=device).bfloat16()[:, :nope_dim] * nope_dim**-0.5
    latent = torch.randn(num_tokens, rank + rope_dim + 8, device=device).bfloat16()[:, : rank + rope_dim]
    norm = torch.rand(rank, device=device).bfloat16()
    positions, slots = torch.arange(num_tokens, device=device) + 3, torch.randperm(64, device=device)[:num_tokens]
    slots[num_tokens // 2] = -1
    caches = [ops.empty_latent_cache(2, 32, rank, rope_dim, FP8_DTYPE if is_fp8 else q.dtype, device) for _ in range(2)]
    latents = ops.StepLatents(latent, ops.TokenSlots(positions, slots), rope, norm, 1e-6)
    found = ops.absorb_latent(q, keys, latents, caches[0], backend=backend)
    expected = q.new_empty(num_tokens, num_heads, rank + rope_dim)
    own = "auto" if backend == "reference" else backend
    ops.head_mm(q[..., :nope_dim], keys.transpose(1, 2), expected[..., :rank], backend=own)
    ops.write_latent(q[..., nope_dim:], latents, caches[1], expected[..., rank:], backend=own)
    assert torch.equal(found, expected)
    rows = [cache.rows.view(torch.uint8) for cache in caches]
    assert torch.equal(*rows) and rows[0].any() == (num_tokens > 1)


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    rope, cache = make_rope(16, device), ops.empty_latent_cache(1, 32, 32, 16, torch.bfloat16, device)
    q, keys, latent, norm = (
        torch.zeros(*size, dtype=torch.bfloat16, device=device) for size in ((2, 3, 40), (3, 24, 32), (2, 48), (32,))
    )
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    for named, (first, second, third) in {
        "x: shape": (q[:, :2], keys, latent),
        "weight: dtype": (q, keys.float(), latent),
        "latents.rows: shape": (q, keys, latent[:1]),
        "rope: 16 features": (q, keys[:, 1:], latent),
    }.items():
        with pytest.raises(ValueError, match=named):
            ops.absorb_latent(
                first, second, ops.StepLatents(third, ops.TokenSlots(numbers, numbers), rope, norm, 1e-6), cache
            )
    with pytest.raises(ValueError, match="triton cannot run absorb_latent: 65 tokens"):
        many = numbers[:1].expand(65)
        latents = ops.StepLatents(latent[:1].expand(65, 48), ops.TokenSlots(many, many), rope, norm, 1e-6)
        ops.absorb_latent(q[:1].expand(65, 3, 40), keys, latents, cache, backend="triton")
