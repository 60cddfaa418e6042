"""Ragged attention in plain torch, one request at a time, fp32."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.ragged_call import RaggedCall


def ragged_attention(call: RaggedCall) -> None:
    """See ops.ragged_attention; writes call.out and call.lse."""
    metadata = call.metadata
    starts, key_starts = metadata.query_start_loc.tolist(), metadata.key_start_loc.tolist()
    for request, key_len in enumerate(metadata.key_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        keys = slice(key_starts[request], key_starts[request] + key_len)
        out, lse = _attend(call, rows, keys)
        call.out[rows], call.lse[rows] = out.to(call.out.dtype), lse


def _attend(call: RaggedCall, rows: slice, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's rows: [query_len, num_heads, value_dim] and [query_len, num_heads], fp32."""
    q, k, v = (tensor.float().transpose(0, 1) for tensor in (call.q[rows], call.keys.k[keys], call.keys.v[keys]))
    nope, (query_len, key_len) = k.shape[2], (q.shape[1], k.shape[1])
    scores = torch.bmm(q[..., :nope], k.transpose(1, 2)) + q[..., nope:] @ call.keys.k_rope[keys].float().t()
    scores *= call.scale
    if call.metadata.is_causal:
        positions = torch.arange(key_len - query_len, key_len, device=q.device)
        scores.masked_fill_(torch.arange(key_len, device=q.device) > positions[:, None], float("-inf"))
    # A row that sees nothing becomes zero, not NaN.
    out = torch.bmm(torch.softmax(scores, dim=-1).nan_to_num(0.0), v)
    return out.transpose(0, 1), scores.logsumexp(dim=-1).t()
