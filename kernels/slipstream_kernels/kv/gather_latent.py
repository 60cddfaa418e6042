"""gather_latent: contract and choice.  Copies cached latents of several requests side by side, as numbers."""

from __future__ import annotations

import torch

from slipstream_kernels.latent_cache import LatentCache, TokenRanges, check_latent_cache
from slipstream_kernels.select import require_float, require_shape, select


def gather_latent(cache: LatentCache, ranges: TokenRanges, out: torch.Tensor, *, backend: str = "auto") -> None:
    """Write the tokens' latents to their rows of out; rows between those of two requests are zeroed.

    out: [n, rank + rope_dim], contiguous, of the model's dtype, to which FP8 latents are dequantised.  Rows from
    start_loc[-1] on are unspecified.
    """
    require_float("out", out)
    require_shape("out", out, (out.shape[0], cache.rank + cache.rope_dim))
    if not out.is_contiguous() or ranges.block_tables.dim() != 2:
        raise ValueError("out: must be contiguous, with block_tables of two dimensions")
    num_requests = ranges.block_tables.shape[0]
    for name, numbers, size in (
        ("first_tokens", ranges.first_tokens, num_requests),
        ("lens", ranges.lens, num_requests),
        ("start_loc", ranges.start_loc, num_requests + 1),
    ):
        require_shape(name, numbers, (size,))
        if numbers.dtype != torch.int32:
            raise ValueError(f"{name}: dtype {numbers.dtype}, expected int32")
    check_latent_cache(cache, out.dtype)
    select("kv.gather_latent", backend, out).gather_latent(cache, ranges, out)
