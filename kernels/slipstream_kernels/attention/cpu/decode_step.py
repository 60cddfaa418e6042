"""A decode step on a CPU: rotate, store and attend one row of each request, in few torch calls per layer.

A call of torch costs 1 to 4 us and a small model has 30 layers, so what layers share (indices, masks, angles) is made
once per step.  The definition is reference/paged_attention.py after kv/reference/rope_write_kv.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from slipstream_kernels.attention.attention_call import AttentionOptions
from slipstream_kernels.attention.reference.paged_attention import GATHER_BYTES, bucket_blocks, matmul_dtype
from slipstream_kernels.kv_cache import KvCache
from slipstream_kernels.norm.rms_norm import rms_norm
from slipstream_kernels.rotation import QKRope, Rope
from slipstream_kernels.token_slots import TokenSlots

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Piece:
    """Requests that are attended together, by number.  tiles: of a cache seen as [num_blocks * num_kv_heads, …]."""

    requests: torch.Tensor
    tiles: torch.Tensor
    num_keys: int


@dataclass
class CpuDecodeStep:
    """slots (none is -1), seq_lens, block_tables: of one row per request, as ops.rope_write_kv and
    ops.paged_attention take them.  Each layer calls rotate_and_store, then attend.

    The other fields keep what layers share, by what it depends on: the rope, the shape of the cache, the window.
    """

    slots: TokenSlots
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    _angles: dict[int, Angles] = field(default_factory=dict)
    _slots: dict[torch.Size, torch.Tensor] = field(default_factory=dict)
    _pieces: dict[torch.Size, list[_Piece]] = field(default_factory=dict)
    _masks: dict[tuple[torch.Size, int | None], list[torch.Tensor]] = field(default_factory=dict)

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qk_rope: QKRope,
        cache: KvCache,
    ) -> torch.Tensor:
        """As ops.rope_write_kv, for a cache of the heads' own type.  Returns the queries, contiguous."""
        rope, norms = qk_rope.rope, qk_rope.norms
        if norms is not None and not norms.after_rotation:
            q, k = _normed(q, norms.q, norms.eps), _normed(k, norms.k, norms.eps)
        if rope is not None:
            angles = self._angles_of(rope, q.shape[2])
            q, k = _rotate(q, angles, rope), _rotate(k, angles, rope)
        if norms is not None and norms.after_rotation:
            q, k = _normed(q, norms.q, norms.eps), _normed(k, norms.k, norms.eps)
        slots = self._slots_of(cache.key.shape)
        for heads, store in ((k, cache.key), (v, cache.value)):
            store.view(-1, store.shape[3]).index_copy_(0, slots, heads.reshape(-1, store.shape[3]))
        return q.contiguous()

    def attend(self, q: torch.Tensor, cache: KvCache, options: AttentionOptions) -> torch.Tensor:
        """As ops.paged_attention: [num_requests, num_q_heads, head_dim].  Takes scale and window of the options."""
        pieces, masks = self._pieces_of(cache), self._masks_of(cache, options.sliding_window)
        if len(pieces) == 1:
            return _attend(q, pieces[0], masks[0], cache, options.scale)
        out = torch.empty_like(q)
        for piece, mask in zip(pieces, masks):
            out[piece.requests] = _attend(q[piece.requests], piece, mask, cache, options.scale)
        return out

    def _angles_of(self, rope: Rope, head_dim: int) -> Angles:
        """cos [rows, 1, head_dim], 1 beyond rotary_dim; sin [rows, 1, rotary_dim / 2]."""
        found = self._angles.get(id(rope))
        if found is None:
            cos, sin = rope.cos_sin.index_select(0, self.slots.positions)[:, None].chunk(2, dim=-1)
            twice = cos.repeat_interleave(2, dim=-1) if rope.interleaved else torch.cat((cos, cos), dim=-1)
            rest = twice.new_ones(len(twice), 1, head_dim - rope.rotary_dim)
            found = self._angles[id(rope)] = torch.cat((twice, rest), dim=-1), sin.contiguous()
        return found

    def _slots_of(self, shape: torch.Size) -> torch.Tensor:
        """Where a row's heads go in a cache seen as [num_blocks * num_kv_heads * block_size, head_dim]."""
        found = self._slots.get(shape)
        if found is None:
            _, num_heads, block_size, _ = shape
            slots = self.slots.slot_mapping
            tiles = (slots // block_size)[:, None] * num_heads + torch.arange(num_heads)
            found = self._slots[shape] = (tiles * block_size + (slots % block_size)[:, None]).view(-1)
        return found

    def _pieces_of(self, cache: KvCache) -> list[_Piece]:
        """Groups whose padded length depends on a request's own length alone, cut so that each is gathered at once."""
        found = self._pieces.get(cache.key.shape)
        if found is None:
            groups: dict[int, list[int]] = {}
            for request, seq_len in enumerate(self.seq_lens.tolist()):
                groups.setdefault(bucket_blocks(cache.block_size, seq_len), []).append(request)
            tile_bytes = cache.key[0].numel() * cache.key.itemsize
            found = []
            for num_blocks, requests in groups.items():
                at_once = max(1, GATHER_BYTES // (num_blocks * tile_bytes))
                for first in range(0, len(requests), at_once):
                    found.append(self._piece(requests[first : first + at_once], num_blocks, cache))
            self._pieces[cache.key.shape] = found
        return found

    def _piece(self, requests: list[int], num_blocks: int, cache: KvCache) -> _Piece:
        num_heads, rows = cache.key.shape[1], torch.tensor(requests)
        blocks = self.block_tables[rows, :num_blocks].long().clamp_(min=0)
        blocks = torch.nn.functional.pad(blocks, (0, num_blocks - blocks.shape[1]))  # any block: its keys are masked
        tiles = (blocks[:, None] * num_heads + torch.arange(num_heads)[:, None]).view(-1)
        return _Piece(rows, tiles, num_blocks * cache.block_size)

    def _masks_of(self, cache: KvCache, sliding_window: int | None) -> list[torch.Tensor]:
        """A mask of each piece, [requests * num_kv_heads, 1, num_keys]: 0 where a key is seen, else -inf."""
        key = cache.key.shape, sliding_window
        found = self._masks.get(key)
        if found is None:
            found = self._masks[key] = [self._mask(piece, cache, sliding_window) for piece in self._pieces_of(cache)]
        return found

    def _mask(self, piece: _Piece, cache: KvCache, sliding_window: int | None) -> torch.Tensor:
        ages = self.seq_lens[piece.requests][:, None] - 1 - torch.arange(piece.num_keys)
        hidden = ages < 0 if sliding_window is None else (ages < 0) | (ages >= sliding_window)
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return bias.repeat_interleave(cache.key.shape[1], dim=0)[:, None]


def _normed(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = rms_norm(heads.contiguous(), weight, eps)
    assert isinstance(y, torch.Tensor)
    return y


def _rotate(heads: torch.Tensor, angles: Angles, rope: Rope) -> torch.Tensor:
    cos, sin = angles
    size = rope.rotary_dim
    halves = (slice(0, size, 2), slice(1, size, 2)) if rope.interleaved else (slice(size // 2), slice(size // 2, size))
    wide = heads.float()
    out = wide * cos
    out[..., halves[0]].addcmul_(wide[..., halves[1]], sin, value=-1)
    out[..., halves[1]].addcmul_(wide[..., halves[0]], sin)
    return out.to(heads.dtype)


def _attend(q: torch.Tensor, piece: _Piece, mask: torch.Tensor, cache: KvCache, scale: float) -> torch.Tensor:
    """q: [requests, num_q_heads, head_dim].  The query heads of a kv head share one product."""
    k, v = (_gather(store, piece) for store in (cache.key, cache.value))
    rows = q.view(mask.shape[0], -1, q.shape[2]).to(k.dtype)
    out = _attend_keys(rows, k, v, mask, scale)
    if not bool(out.isfinite().all()):
        # a slot past seq_len may hold a former owner's inf or NaN: 0 * NaN must not leak into this request
        unused = mask.transpose(1, 2).isinf()
        out = _attend_keys(rows, k.masked_fill(unused, 0), v.masked_fill(unused, 0), mask, scale)
    return out.view(q.shape).to(q.dtype)


def _attend_keys(
    rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = torch.bmm(rows, k.transpose(1, 2)).float()  # baddbmm of bf16 takes ten times as long
    return torch.bmm(torch.softmax(scores.mul_(scale).add_(mask), dim=-1).to(rows.dtype), v)


def _gather(store: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """[requests * num_kv_heads, num_keys, head_dim]"""
    _, _, block_size, head_dim = store.shape
    tiles = store.view(-1, block_size * head_dim).index_select(0, piece.tiles)
    return tiles.view(-1, piece.num_keys, head_dim).to(matmul_dtype(store))
