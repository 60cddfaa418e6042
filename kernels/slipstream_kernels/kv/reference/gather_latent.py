"""gather_latent in plain torch."""

from __future__ import annotations

import torch

from slipstream_kernels.kv.reference.write_latent import read_latents
from slipstream_kernels.latent_cache import LatentCache, TokenRanges


def gather_latent(cache: LatentCache, ranges: TokenRanges, out: torch.Tensor) -> None:
    """See ops.gather_latent."""
    starts = ranges.start_loc.tolist()
    for request, (first, length) in enumerate(zip(ranges.first_tokens.tolist(), ranges.lens.tolist())):
        start = starts[request]
        slots = slots_of(ranges.block_tables[request], first, first + length, cache.block_size)
        out[start : start + length] = read_latents(cache, slots).to(out.dtype)
        out[start + length : starts[request + 1]] = 0


def slots_of(blocks: torch.Tensor, first: int, stop: int, block_size: int) -> torch.Tensor:
    """Slots of a request's tokens first .. stop, int64."""
    tokens = torch.arange(first, stop, device=blocks.device)
    return blocks[tokens // block_size].long() * block_size + tokens % block_size
