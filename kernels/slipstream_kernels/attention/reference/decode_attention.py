"""Decode attention in plain torch: every cache type and option, one request at a time, fp32."""

from __future__ import annotations

import torch

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.kv.reference.quantized_kv import dequantize_rows
from slipstream_kernels.kv_cache import TOKEN_SCALED_DTYPES


def decode_attention(call: AttentionCall) -> None:
    """See ops.decode_attention; writes call.out."""
    starts = call.metadata.query_start_loc.tolist()
    for request, seq_len in enumerate(call.metadata.seq_lens.tolist()):
        start, stop = starts[request], starts[request + 1]
        if seq_len == 0:
            call.out[start:stop] = 0
        elif start < stop:
            call.out[start:stop] = _attend(call, request, slice(start, stop), seq_len).to(call.out.dtype)


def _attend(call: AttentionCall, request: int, rows: slice, seq_len: int) -> torch.Tensor:
    """One request's rows: [query_len, num_q_heads, head_dim] fp32."""
    options, positions = call.options, call.metadata.positions
    window = options.sliding_window
    first_key = 0 if window is None else max(0, seq_len - (rows.stop - rows.start) - window + 1)
    k = _gather(call, call.cache.key, call.cache.key_scale, request, seq_len, first_key)
    v = _gather(call, call.cache.value, call.cache.value_scale, request, seq_len, first_key)
    q = call.q[rows].float()
    num_kv_heads = k.shape[0]
    q = q.view(q.shape[0], num_kv_heads, -1, q.shape[2])
    scores = torch.einsum("qhgd,hkd->hgqk", q, k) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    query_len = q.shape[0]
    prefix = seq_len - query_len
    key_positions = torch.arange(seq_len, device=q.device)
    if positions is not None:
        key_positions[prefix:] = positions[rows]
    distance = key_positions[prefix:, None] - key_positions
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes.view(num_kv_heads, -1, 1, 1) * distance
    scores = scores.masked_fill(~_visible(call, rows, seq_len, distance), float("-inf"))
    # A row that sees nothing becomes zero, not NaN.
    probs = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    if options.sinks is not None:
        probs = probs * torch.sigmoid(scores.logsumexp(dim=-1) - options.sinks.view(num_kv_heads, -1, 1))[..., None]
    return torch.einsum("hgqk,hkd->qhgd", probs, v).flatten(1, 2)


def _visible(call: AttentionCall, rows: slice, seq_len: int, distance: torch.Tensor) -> torch.Tensor:
    """[query_len, seq_len] bool: which keys each row sees."""
    query_len, tree_mask, window = rows.stop - rows.start, call.metadata.tree_mask, call.options.sliding_window
    draft = torch.arange(query_len, device=distance.device)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if tree_mask is None:
        visible[:, seq_len - query_len :] = draft[:, None] >= draft
    else:
        visible[:, seq_len - query_len :] = (tree_mask[rows][:, None] >> draft) & 1 == 1
    if window is not None:
        visible &= distance < window
    return visible


def _gather(
    call: AttentionCall, cache: torch.Tensor, scale: torch.Tensor | None, request: int, seq_len: int, first_key: int
) -> torch.Tensor:
    """A request's cached rows, dequantised: [num_kv_heads, seq_len, head_dim] fp32.  Zeros before first_key, where
    blocks may be another request's by now.
    """
    block_size = cache.shape[2]
    blocks = call.metadata.block_tables[request, : -(-seq_len // block_size)].long().clamp(min=0)
    if scale is not None and cache.dtype in TOKEN_SCALED_DTYPES:
        rows = dequantize_rows(cache[blocks], scale[blocks])
    else:
        rows = dequantize_rows(cache[blocks], None if scale is None else scale[:, None])
    rows = rows.transpose(0, 1).flatten(1, 2)[:, :seq_len]
    if first_key:
        rows = rows.clone()
        rows[:, :first_key] = 0
    return rows
