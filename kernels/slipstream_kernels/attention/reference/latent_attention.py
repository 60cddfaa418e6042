"""Latent attention in plain torch, one request at a time, fp32."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.kv.reference.gather_latent import slots_of
from slipstream_kernels.kv.reference.write_latent import read_latents


def latent_attention(call: LatentCall) -> None:
    """See ops.latent_attention; writes call.out."""
    starts = call.metadata.query_start_loc.tolist()
    for request, seq_len in enumerate(call.metadata.seq_lens.tolist()):
        start, stop = starts[request], starts[request + 1]
        if seq_len == 0:
            call.out[start:stop] = 0
        elif start < stop:
            call.out[start:stop] = _attend(call, request, slice(start, stop), seq_len).to(call.out.dtype)


def _attend(call: LatentCall, request: int, rows: slice, seq_len: int) -> torch.Tensor:
    """One request's rows: [query_len, num_heads, rank] fp32."""
    latents = read_latents(call.cache, slots_of(call.metadata.block_tables[request], 0, seq_len, call.cache.block_size))
    q = call.q[rows].float()
    scores = (q.flatten(0, 1) @ latents.t()).view(*q.shape[:2], seq_len) * call.scale
    scores.masked_fill_(~_visible(call, rows, seq_len)[:, None], float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    return (probs.flatten(0, 1) @ latents[:, : call.rank]).view(*q.shape[:2], call.rank)


def _visible(call: LatentCall, rows: slice, seq_len: int) -> torch.Tensor:
    """[query_len, seq_len] bool: the keys that each row sees."""
    query_len = rows.stop - rows.start
    draft = torch.arange(query_len, device=call.q.device)
    visible = torch.ones(query_len, seq_len, dtype=torch.bool, device=call.q.device)
    own = draft[:, None] >= draft
    if call.metadata.tree_mask is not None:
        own = (call.metadata.tree_mask[rows][:, None] >> draft) & 1 == 1
    visible[:, seq_len - query_len :] = own
    return visible
