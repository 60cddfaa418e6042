"""gather_latent: contract and choice.  Copies cached latents of several requests side by side, as numbers."""

from __future__ import annotations

import torch

from slipstream_kernels.latent_cache import LatentCache, check_latent_cache
from slipstream_kernels.select import require_float, require_shape, select


def gather_latent(
    cache: LatentCache,
    block_tables: torch.Tensor,
    first_tokens: torch.Tensor,
    lens: torch.Tensor,
    out_start_loc: torch.Tensor,
    out: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write tokens first_tokens[r] .. + lens[r] of request r to the rows of out from out_start_loc[r] on.

    block_tables: [num_requests, max_blocks] int32.  first_tokens, lens: [num_requests] int32.  out_start_loc:
    [num_requests + 1] int32, at least lens[r] apart; rows between are zeroed.  out: [n, rank + rope_dim], contiguous,
    of the model's dtype, to which FP8 latents are dequantised.  Rows from out_start_loc[-1] on are unspecified.
    """
    require_float("out", out)
    require_shape("out", out, (out.shape[0], cache.rank + cache.rope_dim))
    if not out.is_contiguous() or block_tables.dim() != 2:
        raise ValueError("out: must be contiguous, with block_tables of two dimensions")
    num_requests = block_tables.shape[0]
    for name, numbers, size in (
        ("first_tokens", first_tokens, num_requests),
        ("lens", lens, num_requests),
        ("out_start_loc", out_start_loc, num_requests + 1),
    ):
        require_shape(name, numbers, (size,))
        if numbers.dtype != torch.int32:
            raise ValueError(f"{name}: dtype {numbers.dtype}, expected int32")
    check_latent_cache(cache, out.dtype)
    implementation = select("kv.gather_latent", backend, out)
    implementation.gather_latent(cache, block_tables, first_tokens, lens, out_start_loc, out)
