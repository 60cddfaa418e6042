"""Paged attention in plain torch: the oracle, and the engine's CPU path.

Short queries (decode and verify rows) are gathered and computed together, in groups whose padded length depends only
on a request's own lengths, so that a request's result does not depend on who shares the step.  Long queries go one
by one through SDPA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream_kernels.attention_call import AttentionCall

SHORT_QUERY_LEN = 16
# A gathered piece larger than this is returned to the system by malloc after use, and its page faults then cost more
# than the attention (measured: 10 MB pieces 17 ms, 4 MB pieces 3 ms, for 64 requests of 300 tokens in fp32 on one
# core).
GATHER_BYTES = 4 << 20
MIN_BUCKET_TOKENS = 64


def paged_attention(call: AttentionCall) -> None:
    """See ops.paged_attention; writes call.out."""
    starts, seq_lens = call.query_start_loc.tolist(), call.seq_lens.tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for request, seq_len in enumerate(seq_lens):
        query_len = starts[request + 1] - starts[request]
        if query_len == 0:
            continue
        if seq_len == 0:
            call.out[starts[request] : starts[request + 1]] = 0
        elif query_len <= SHORT_QUERY_LEN:
            groups.setdefault((query_len, _bucket_blocks(call, seq_len)), []).append(request)
        else:
            _attend_long(call, request, starts[request], starts[request + 1], seq_len)
    for (query_len, num_blocks), requests in groups.items():
        row_bytes = num_blocks * call.key_cache[0].numel() * call.key_cache.element_size()
        num_rows = max(1, GATHER_BYTES // row_bytes)
        for first in range(0, len(requests), num_rows):
            piece = requests[first : first + num_rows]
            _attend_short(call, piece, [starts[r] for r in piece], [seq_lens[r] for r in piece], query_len, num_blocks)


def _bucket_blocks(call: AttentionCall, seq_len: int) -> int:
    """Blocks to gather for a length: rounded up to 1, 2, 3, 4, 6, 8, 12, ...

    Units of at least 64 tokens (waste <= 1/3).
    """
    block_size = call.key_cache.shape[2]
    unit = max(block_size, MIN_BUCKET_TOKENS)
    needed = -(-seq_len // unit)
    power = 1 << (needed - 1).bit_length()
    units = power * 3 // 4 if power >= 4 and needed <= power * 3 // 4 else power
    return units * unit // block_size


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Copy whole blocks: blocks [n, num_blocks] int64 -> [n * num_kv_heads, num_blocks * block_size, head_dim].

    One index_select over (block, head) rows lands in the final order; indexing by block would need a second,
    transposing copy.
    """
    num_heads, block_size, head_dim = cache.shape[1:]
    heads = torch.arange(num_heads, device=cache.device)
    rows = (blocks[:, None, :] * num_heads + heads[:, None]).view(-1)
    return cache.view(-1, block_size * head_dim).index_select(0, rows).view(-1, blocks.shape[1] * block_size, head_dim)


def _blocks_of(call: AttentionCall, requests: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Block ids of the requests, [n, num_blocks] int64;
    where a table is shorter or padded, any valid block stands in.
    """
    table = call.block_tables[requests, :num_blocks].long().clamp_(min=0)
    return F.pad(table, (0, num_blocks - table.shape[1])) if table.shape[1] < num_blocks else table


def _has_native_bf16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _matmul_dtype(q: torch.Tensor) -> torch.dtype:
    """bf16 where the CPU multiplies it natively (2.4x faster than fp32 here: half the bytes);
    fp16 never on a CPU (6x slower).
    """
    if q.is_cuda or (q.dtype == torch.bfloat16 and _has_native_bf16()):
        return q.dtype
    return torch.float32


def _attend_short(
    call: AttentionCall, requests: list[int], starts: list[int], seq_lens: list[int], query_len: int, num_blocks: int
) -> None:
    """Attend n requests of the same query_len, keys padded to num_blocks blocks;
    GQA rows share one matmul per kv head.
    """
    device, dtype = call.q.device, _matmul_dtype(call.q)
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads = call.key_cache.shape[1]
    n, group = len(requests), num_heads // num_kv_heads
    lens = torch.tensor(seq_lens, device=device)
    tokens = (torch.tensor(starts, device=device)[:, None] + torch.arange(query_len, device=device)).view(-1)
    blocks = _blocks_of(call, torch.tensor(requests, device=device), num_blocks)

    q = call.q[tokens].view(n, query_len, num_kv_heads, group, head_dim).transpose(1, 2)
    q = q.reshape(n * num_kv_heads, query_len * group, head_dim).to(dtype)
    scores = torch.bmm(q, _gather(call.key_cache, blocks).to(dtype).transpose(1, 2)).float()
    scores = scores.view(n, num_kv_heads, query_len, group, -1)

    query_positions = (lens[:, None] - query_len + torch.arange(query_len, device=device))[:, None, :, None, None]
    probs = _softmax(call, scores, query_positions).to(dtype).view(n * num_kv_heads, query_len * group, -1)
    values = _gather(call.value_cache, blocks).to(dtype)
    out = torch.bmm(probs, values)
    if not bool(torch.isfinite(out).all()):
        # 0 * NaN: a slot past seq_len may hold a former owner's inf or NaN, which must not leak into this request.
        unused = torch.arange(values.shape[1], device=device) >= lens.repeat_interleave(num_kv_heads)[:, None]
        out = torch.bmm(probs, values.masked_fill_(unused[:, :, None], 0))
    out = out.view(n, num_kv_heads, query_len, group, head_dim).transpose(1, 2).reshape(-1, num_heads, head_dim)
    call.out[tokens] = out.to(call.out.dtype)


def _softmax(call: AttentionCall, scores: torch.Tensor, query_positions: torch.Tensor) -> torch.Tensor:
    """Scale, cap, bias, mask and normalise scores [n, num_kv_heads, query_len, group, num_keys] fp32
    (overwritten).
    """
    keys = torch.arange(scores.shape[-1], device=scores.device)
    scores.mul_(call.scale)
    if call.soft_cap is not None:
        scores.div_(call.soft_cap).tanh_().mul_(call.soft_cap)
    if call.alibi_slopes is not None:
        scores += call.alibi_slopes.view(scores.shape[1], 1, -1, 1) * (keys - query_positions)
    masked = keys > query_positions
    if call.sliding_window is not None:
        masked |= query_positions - keys >= call.sliding_window
    return torch.softmax(scores.masked_fill_(masked, float("-inf")), dim=-1)


def _attend_long(call: AttentionCall, request: int, start: int, stop: int, seq_len: int) -> None:
    """Attend one request's prompt or chunk.  kv heads are SDPA's batch and their GQA group its heads:
    K and V are not repeated.
    """
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads, block_size = call.key_cache.shape[1:3]
    query_len, group = stop - start, num_heads // num_kv_heads
    dtype = torch.float32 if call.q.dtype == torch.float16 and not call.q.is_cuda else call.q.dtype
    blocks = call.block_tables[request : request + 1, : -(-seq_len // block_size)].long()
    k = _gather(call.key_cache, blocks)[:, None, :seq_len].to(dtype)
    v = _gather(call.value_cache, blocks)[:, None, :seq_len].to(dtype)
    q = call.q[start:stop].view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).to(dtype)
    if call.soft_cap is not None or call.alibi_slopes is not None:
        out = _attend_unfused(call, q, k, v)
    else:
        shape = (num_kv_heads, group, seq_len, head_dim)
        mask = None if query_len == seq_len and call.sliding_window is None else _visible(call, query_len, seq_len)
        out = F.scaled_dot_product_attention(
            q, k.expand(shape), v.expand(shape), attn_mask=mask, is_causal=mask is None, scale=call.scale
        )
    call.out[start:stop] = out.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim).to(call.out.dtype)


def _visible(call: AttentionCall, query_len: int, seq_len: int) -> torch.Tensor:
    """Which keys each query sees: [query_len, seq_len] bool."""
    keys = torch.arange(seq_len, device=call.q.device)
    queries = keys[seq_len - query_len :, None]
    visible = keys <= queries
    return visible if call.sliding_window is None else visible & (queries - keys < call.sliding_window)


def _attend_unfused(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA has neither soft cap nor (cheap) ALiBi.  q: [num_kv_heads, group, query_len, head_dim];
    64 query rows at a time.
    """
    query_len, seq_len = q.shape[2], k.shape[2]
    pieces = []
    for first in range(0, query_len, 64):
        rows = q[:, :, first : first + 64]
        scores = torch.matmul(rows.float(), k.float().transpose(-1, -2)).transpose(1, 2)[None]
        positions = torch.arange(first, first + rows.shape[2], device=q.device) + seq_len - query_len
        probs = _softmax(call, scores.contiguous(), positions[None, None, :, None, None])[0].transpose(1, 2)
        pieces.append(torch.matmul(probs, v.float()))
    return torch.cat(pieces, dim=2).to(q.dtype)
