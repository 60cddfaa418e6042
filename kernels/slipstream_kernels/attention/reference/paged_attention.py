"""Paged attention in plain torch: the oracle, and the engine's CPU path.

Short queries (decode and verify rows) are gathered and computed together, in groups whose padded length depends only
on a request's own lengths, so that a request's result does not depend on who shares the step.  Long queries go one
by one through SDPA.  Blocks that a window has passed are never read: they may be another request's by now.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.reference.stage_fp8 import attend_rounded, rounded_queries, to_e4m3
from slipstream_kernels.kv.reference.quantized_kv import dequantize_rows
from slipstream_kernels.kv_cache import FP8_DTYPE, QUANTIZED_DTYPES

SHORT_QUERY_LEN = 16
# K, then V, of a piece are gathered into one workspace, allocated once per call: malloc gives larger or more numerous
# pieces back to the system, and their page faults then cost more than the attention (17 ms against 4 ms in fp32 here).
GATHER_BYTES = 8 << 20
MIN_BUCKET_TOKENS = 64


@dataclass(frozen=True)
class ShortPiece:
    """Requests that are attended together: the same query_len, keys padded to num_blocks blocks.

    first_blocks: of each request, the block that its keys begin with.
    """

    requests: list[int]
    first_blocks: list[int]
    query_len: int
    num_blocks: int
    workspace: torch.Tensor


def paged_attention(call: AttentionCall) -> None:
    """See ops.paged_attention; writes call.out."""
    starts, seq_lens = call.metadata.query_start_loc.tolist(), call.metadata.seq_lens.tolist()
    block_size = call.cache.block_size
    groups: dict[tuple[int, int], list[int]] = {}
    for request, seq_len in enumerate(seq_lens):
        query_len = starts[request + 1] - starts[request]
        if query_len == 0:
            continue
        if seq_len == 0:
            call.out[starts[request] : starts[request + 1]] = 0
        elif query_len <= SHORT_QUERY_LEN:
            num_keys = seq_len - _first_block(call, query_len, seq_len) * block_size
            groups.setdefault((query_len, bucket_blocks(block_size, num_keys)), []).append(request)
        else:
            _attend_long(call, request, starts[request], starts[request + 1], seq_len)
    row_size = call.cache.key[0].nbytes
    rows_at_once = {key: max(1, GATHER_BYTES // (key[1] * row_size)) for key in groups}
    size = max((min(rows_at_once[key], len(groups[key])) * key[1] * row_size for key in groups), default=0)
    workspace = torch.empty(size, dtype=torch.uint8, device=call.q.device)
    for (query_len, num_blocks), requests in groups.items():
        num_rows = rows_at_once[query_len, num_blocks]
        for first in range(0, len(requests), num_rows):
            some = requests[first : first + num_rows]
            first_blocks = [_first_block(call, query_len, seq_lens[request]) for request in some]
            piece = ShortPiece(some, first_blocks, query_len, num_blocks, workspace)
            _attend_short(call, piece, starts, seq_lens)


def _first_block(call: AttentionCall, query_len: int, seq_len: int) -> int:
    """The first block that a request's queries see any key of."""
    window = call.options.sliding_window
    return 0 if window is None else max(0, seq_len - query_len - window + 1) // call.cache.block_size


def bucket_blocks(block_size: int, seq_len: int) -> int:
    """Blocks to gather for a length: units of at least 64 tokens, rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    unit = max(block_size, MIN_BUCKET_TOKENS)
    needed = -(-seq_len // unit)
    step = max(1, (1 << (needed - 1).bit_length()) // 4)
    return -(-needed // step) * step * unit // block_size


def _gather(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    blocks: torch.Tensor,
    dtype: torch.dtype,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Whole blocks, dequantised: blocks [n, num_blocks] int64 -> [n * num_kv_heads, num_blocks * block_size, head_dim].

    One index_select over (block, head) rows lands in the final order; indexing by block would need a second,
    transposing copy.
    """
    num_heads, block_size, width = cache.shape[1:]
    heads = torch.arange(num_heads, device=cache.device)
    rows = (blocks[:, None, :] * num_heads + heads[:, None]).view(-1)
    tiles = cache.view(-1, block_size * width)
    if cache.dtype == FP8_DTYPE:
        tiles = tiles.view(torch.uint8)  # index_select of fp8 is not implemented everywhere
    out = None
    if workspace is not None:
        num_bytes = rows.numel() * tiles.shape[1] * tiles.element_size()
        out = workspace[:num_bytes].view(tiles.dtype).view(rows.numel(), -1)
    gathered = torch.index_select(tiles, 0, rows, out=out).view(cache.dtype)
    gathered = gathered.view(-1, blocks.shape[1] * block_size, width)
    if cache.dtype not in QUANTIZED_DTYPES:
        return gathered.to(dtype)
    return dequantize_rows(gathered, _scales(cache, scale, rows, blocks.shape[0])).to(dtype)


def _scales(cache: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor, n: int) -> torch.Tensor | None:
    """Scales of the rows that _gather collects: what broadcasts to [n * num_kv_heads, num_keys]."""
    if scale is None or cache.dtype == FP8_DTYPE:
        return None if scale is None else scale.repeat(n)[:, None]
    num_heads, block_size = cache.shape[1:3]
    return scale.view(-1, block_size).index_select(0, rows).view(n * num_heads, -1)


def _blocks_of(call: AttentionCall, piece: ShortPiece) -> torch.Tensor:
    """Block ids of the requests from their first blocks on, [n, num_blocks] int64;
    where a table is shorter or padded, any valid block stands in.
    """
    requests, num_blocks = torch.tensor(piece.requests, device=call.q.device), piece.num_blocks
    tables = call.metadata.block_tables
    if not any(piece.first_blocks):
        table = tables[requests, :num_blocks].long().clamp_(min=0)
        return F.pad(table, (0, num_blocks - table.shape[1])) if table.shape[1] < num_blocks else table
    first = torch.tensor(piece.first_blocks, device=call.q.device)
    columns = first[:, None] + torch.arange(num_blocks, device=call.q.device)
    is_there = columns < tables.shape[1]
    table = tables[requests[:, None], columns.clamp(max=tables.shape[1] - 1)].long()
    return torch.where(is_there, table, 0).clamp_(min=0)


@cache
def _has_native_bf16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def matmul_dtype(q: torch.Tensor) -> torch.dtype:
    """bf16 where the CPU multiplies it natively (2.4x faster than fp32 here: half the bytes);
    fp16 never on a CPU (6x slower).
    """
    if q.is_cuda or (q.dtype == torch.bfloat16 and _has_native_bf16()):
        return q.dtype
    return torch.float32


def _attend_short(call: AttentionCall, piece: ShortPiece, starts: list[int], seq_lens: list[int]) -> None:
    """Attend one piece; the GQA rows of a kv head share one matmul, so K and V are not repeated."""
    query_len, device = piece.query_len, call.q.device
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads, n = call.cache.num_kv_heads, len(piece.requests)
    block_size = call.cache.block_size
    lens = torch.tensor(
        [seq_lens[r] - first * block_size for r, first in zip(piece.requests, piece.first_blocks)], device=device
    )
    first = torch.tensor([starts[r] for r in piece.requests], device=device)
    tokens = (first[:, None] + torch.arange(query_len, device=device)).view(-1)
    q = call.q.index_select(0, tokens).view(n, query_len, num_kv_heads, -1, head_dim).transpose(1, 2)
    out = _attend_padded(call, piece, q, lens, is_clean=True)
    if not bool(torch.isfinite(out).all()):
        # A slot past seq_len may hold a former owner's inf or NaN, which must not leak into this request (0 * NaN).
        out = _attend_padded(call, piece, q, lens, is_clean=False)
    out = out.transpose(1, 2).reshape(-1, num_heads, head_dim).to(call.out.dtype)
    call.out.index_copy_(0, tokens, out)


def _attend_padded(
    call: AttentionCall, piece: ShortPiece, q: torch.Tensor, lens: torch.Tensor, is_clean: bool
) -> torch.Tensor:
    """q: [n, num_kv_heads, query_len, group, head_dim], returned so.  lens: keys from the first blocks on.  Not
    is_clean: slots past lens are zeroed.
    """
    n, num_kv_heads, query_len, group, head_dim = q.shape
    dtype = matmul_dtype(q)
    blocks = _blocks_of(call, piece)
    keys = torch.arange(blocks.shape[1] * call.cache.block_size, device=q.device)
    unused = None if is_clean else (keys >= lens.repeat_interleave(num_kv_heads)[:, None])[:, :, None]

    k = _gather(call.cache.key, call.cache.key_scale, blocks, dtype, piece.workspace)
    if unused is not None:
        k = k.masked_fill(unused, 0)
    rows = q.reshape(n * num_kv_heads, query_len * group, head_dim).to(dtype)
    scores = torch.bmm(rows, k.transpose(1, 2)).float().view(n, num_kv_heads, query_len, group, -1)
    query_positions = lens[:, None] - query_len + torch.arange(query_len, device=q.device)
    probs = _softmax(call, scores, query_positions[:, None, :, None, None])
    v = _gather(call.cache.value, call.cache.value_scale, blocks, dtype, piece.workspace)
    if unused is not None:
        v = v.masked_fill(unused, 0)
    return torch.bmm(probs.to(dtype).view(n * num_kv_heads, query_len * group, -1), v).view(q.shape)


def _softmax(call: AttentionCall, scores: torch.Tensor, query_positions: torch.Tensor) -> torch.Tensor:
    """Scale, cap, bias, mask and normalise scores [n, num_kv_heads, query_len, group, num_keys] fp32 (overwritten)."""
    options, keys = call.options, torch.arange(scores.shape[-1], device=scores.device)
    scores.mul_(options.scale)
    if options.soft_cap is not None:
        scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    if options.alibi_slopes is not None:
        scores += options.alibi_slopes.view(scores.shape[1], 1, -1, 1) * (keys - query_positions)
    masked = keys > query_positions
    if options.sliding_window is not None:
        masked |= query_positions - keys >= options.sliding_window
    # Adding -inf to a broadcast mask is five times faster than masked_fill_ on the scores.
    bias = torch.zeros(masked.shape, device=scores.device).masked_fill_(masked, float("-inf"))
    scores.add_(bias)
    if options.sinks is None:
        return torch.softmax(scores, dim=-1)
    kept = torch.sigmoid(scores.logsumexp(dim=-1) - options.sinks.view(scores.shape[1], 1, -1))
    return torch.softmax(scores, dim=-1).mul_(kept[..., None])


def _attend_long(call: AttentionCall, request: int, start: int, stop: int, seq_len: int) -> None:
    """Attend one request's prompt or chunk.  kv heads are SDPA's batch and their GQA group its heads:
    K and V are not repeated.
    """
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads, block_size = call.cache.key.shape[1:3]
    query_len, group, options = stop - start, num_heads // num_kv_heads, call.options
    dtype = torch.float32 if call.q.dtype == torch.float16 and not call.q.is_cuda else call.q.dtype
    first_block = _first_block(call, query_len, seq_len)
    blocks = call.metadata.block_tables[request : request + 1, first_block : -(-seq_len // block_size)].long()
    seq_len -= first_block * block_size  # positions are counted from that block on: only distances matter
    k = _gather(call.cache.key, call.cache.key_scale, blocks, dtype)[:, None, :seq_len]
    v = _gather(call.cache.value, call.cache.value_scale, blocks, dtype)[:, None, :seq_len]
    q = call.q[start:stop].view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).to(dtype)
    if options.key_mean is not None:
        out = _attend_in_fp8(call, q, k.float() - options.key_mean[:, None, None], v)
    elif options.soft_cap is not None or options.alibi_slopes is not None or options.sinks is not None:
        out = _attend_unfused(call, q, k, v)
    else:
        shape = (num_kv_heads, group, seq_len, head_dim)
        mask = None if query_len == seq_len and options.sliding_window is None else _visible(call, query_len, seq_len)
        out = F.scaled_dot_product_attention(
            q, k.expand(shape), v.expand(shape), attn_mask=mask, is_causal=mask is None, scale=options.scale
        )
    call.out[start:stop] = out.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim).to(call.out.dtype)


def _attend_in_fp8(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q: [num_kv_heads, group, query_len, head_dim]; k: less its mean; 64 query rows at a time."""
    query_len, seq_len = q.shape[2], k.shape[2]
    keys, values = to_e4m3(k).float().transpose(-1, -2) * call.options.scale, to_e4m3(v).float()
    hidden = ~_visible(call, query_len, seq_len)
    pieces = []
    for first in range(0, query_len, 64):
        rows = slice(first, first + 64)
        scores = torch.matmul(rounded_queries(q[:, :, rows]), keys)
        pieces.append(attend_rounded(scores.masked_fill_(hidden[rows], float("-inf")), values))
    return torch.cat(pieces, dim=2)


def _visible(call: AttentionCall, query_len: int, seq_len: int) -> torch.Tensor:
    """Which keys each query sees: [query_len, seq_len] bool."""
    keys = torch.arange(seq_len, device=call.q.device)
    queries = keys[seq_len - query_len :, None]
    visible = keys <= queries
    window = call.options.sliding_window
    return visible if window is None else visible & (queries - keys < window)


def _attend_unfused(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA has neither soft cap nor sinks nor (cheap) ALiBi.  q: [num_kv_heads, group, query_len, head_dim];
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
