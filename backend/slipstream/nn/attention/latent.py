"""The attention backend of latent attention (MLA): absorbed for decodes, un-absorbed for prompts.

Absorbed, a query is multiplied into the latents' space, where all heads attend to one row per token: least bytes, and
3.4 times the FLOPs of un-absorbed attention. Un-absorbed, keys and values of every head are made from the cached
latents first: worth it where a latent serves about 170 queries or more. A prompt attends to its own tokens first, then
to those before them, in pieces of a fixed workspace, merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.attention.backend import LatentLayer
from slipstream.nn.attention.split_step import Rows, decode_rows, last_metadata, rows_after, slots_of
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.kv_types import gpu_geometry_refusal
from slipstream.nn.spec import DecoderSpec

# Cached tokens whose keys and values are made at once, for all heads.
PREFIX_TOKENS = 8192
# Queries of the longest prompt of a step, below which its prompts with cached tokens before them are absorbed too:
# 262,144 FLOPs a head make a token's keys and values, which save 1,536 a query (V2 and V3).
ABSORBED_QUERIES = 170


@dataclass(frozen=True)
class LatentBackend:
    spec: DecoderSpec

    @staticmethod
    def supports(
        spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if any(attention.latent is None for attention in spec.attentions):
            return "needs layers of latent attention"
        return None

    def graph_refusal(self, block_size: int, has_trees: bool = False) -> str | None:
        return gpu_geometry_refusal(self.spec, block_size)

    def plan(self, batch: ForwardBatch) -> AbsorbedAndPrompts:
        """In a CUDA graph all rows are absorbed: what is before its prompts is not known."""
        leading = decode_rows(batch)
        decodes, prompts = LatentRows.of(batch, leading), LatentRows.of(batch, rows_after(batch, leading))
        prefixes = batch.prompt_prefixes
        if prompts is None:
            return AbsorbedAndPrompts(batch, decodes, None, None)
        if prefixes is None or (any(prefixes) and batch.max_query_len < ABSORBED_QUERIES):
            return AbsorbedAndPrompts(batch, decodes, prompts, None)
        return AbsorbedAndPrompts(batch, decodes, None, PromptKeys.of(prompts, prefixes))


@dataclass(frozen=True)
class LatentRows(Rows):
    """slots: of these tokens, which are stored apart from others."""

    slots: ops.TokenSlots

    @classmethod
    def of(cls, batch: ForwardBatch, rows: Rows | None) -> LatentRows | None:
        return None if rows is None else cls(rows.tokens, rows.metadata, slots_of(batch, rows.tokens))


@dataclass(frozen=True)
class KeyPiece:
    """Cached tokens of each prompt whose keys and values are made at once, num_rows in all; how queries see them."""

    ranges: ops.TokenRanges
    metadata: ops.RaggedMetadata
    num_rows: int


@dataclass(frozen=True)
class PromptKeys:
    """rows: the prompts'. own: their tokens of this step; before: pieces of those that were cached before it."""

    rows: LatentRows
    own: KeyPiece
    before: tuple[KeyPiece, ...]

    @classmethod
    def of(cls, rows: LatentRows, prefixes: Sequence[int]) -> PromptKeys:
        """prefixes: upper bounds of each prompt's cached tokens, of which the device knows the numbers."""
        tables, starts, most = rows.metadata.block_tables, rows.metadata.query_start_loc, rows.metadata.max_query_len
        query_lens = starts.diff()
        cached = rows.metadata.seq_lens - query_lens
        own = KeyPiece(
            ops.TokenRanges(tables, cached, query_lens, starts),
            ops.RaggedMetadata(starts, starts, query_lens, most, most, is_causal=True),
            len(rows.slots.positions),
        )
        pieces = []
        for spans in _spans(prefixes):
            key_starts = [0]
            for first, stop in spans:
                key_starts.append(key_starts[-1] + stop - first)
            numbers = torch.tensor([[*(first for first, _ in spans), 0], [*(stop for _, stop in spans), 0], key_starts])
            first_tokens, stops, start_loc = numbers.to(torch.int32).to(cached.device)
            lens = (torch.minimum(cached, stops[:-1]) - first_tokens[:-1]).clamp(min=0)
            longest = max(stop - first for first, stop in spans)
            ranges = ops.TokenRanges(tables, first_tokens[:-1], lens, start_loc)
            metadata = ops.RaggedMetadata(starts, start_loc, lens, most, longest, is_causal=False)
            pieces.append(KeyPiece(ranges, metadata, key_starts[-1]))
        return cls(rows, own, tuple(pieces))


def _spans(prefixes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """[first, stop) of each prompt's cached tokens, piece by piece of at most PREFIX_TOKENS in all."""
    done = [0] * len(prefixes)
    while any(count < length for count, length in zip(done, prefixes)):
        left, spans = PREFIX_TOKENS, []
        for prompt, length in enumerate(prefixes):
            first = done[prompt]
            done[prompt] = min(length, first + left)
            left -= done[prompt] - first
            spans.append((first, done[prompt]))
        yield spans


@dataclass(frozen=True)
class AbsorbedAndPrompts:
    """decodes: absorbed rows at the step's beginning, perhaps trees. tails: other absorbed rows. prompts: the rest."""

    batch: ForwardBatch
    decodes: LatentRows | None
    tails: LatentRows | None
    prompts: PromptKeys | None

    def forward(self, q: Tensor, latent: Tensor, layer: LatentLayer, cache: ops.LatentCache) -> Tensor:
        """Each part attends behind its own rows' write: parts are of different requests."""
        out = q.new_empty(*q.shape[:2], layer.kv_b.shape[1] - layer.nope_dim)
        for rows in (self.decodes, self.tails):
            if rows is None:
                continue
            tokens = rows.tokens
            latents = step_latents(rows.slots, latent[tokens], layer)
            absorbed = ops.absorb_latent(q[tokens], layer.kv_b[:, : layer.nope_dim], latents, cache)
            _attend_absorbed(absorbed, cache, rows.metadata, layer, out[tokens])
        if self.prompts is not None:
            tokens = self.prompts.rows.tokens
            q_rope = q[tokens, :, layer.nope_dim :]
            ops.write_latent(q_rope, step_latents(self.prompts.rows.slots, latent[tokens], layer), cache, q_rope)
            _attend_prompts(self.prompts, q[tokens], layer, cache, out[tokens])
        return out

    def forward_last(self, q: Tensor, latent: Tensor, layer: LatentLayer, cache: ops.LatentCache) -> Tensor:
        q_rope = q[..., layer.nope_dim :]
        ops.write_latent(q_rope, step_latents(slots_of(self.batch), latent, layer), cache, q_rope)
        q = q[self.batch.logits_indices]
        out = q.new_empty(*q.shape[:2], layer.kv_b.shape[1] - layer.nope_dim)
        if q.shape[0]:
            absorbed = q.new_empty(*q.shape[:2], cache.rank + cache.rope_dim)
            keys = layer.kv_b[:, : layer.nope_dim].transpose(1, 2)
            ops.head_mm(q[..., : layer.nope_dim], keys, absorbed[..., : cache.rank])
            absorbed[..., cache.rank :] = q[..., layer.nope_dim :]
            _attend_absorbed(absorbed, cache, last_metadata(self.batch), layer, out)
        return out


def _attend_absorbed(
    absorbed: Tensor, cache: ops.LatentCache, metadata: ops.AttentionMetadata, layer: LatentLayer, out: Tensor
) -> None:
    """absorbed, out: of the metadata's rows."""
    latents = ops.latent_attention(absorbed, cache, metadata, scale=layer.scale)
    ops.head_mm(latents, layer.kv_b[:, layer.nope_dim :], out)


def _attend_prompts(prompts: PromptKeys, q: Tensor, layer: LatentLayer, cache: ops.LatentCache, out: Tensor) -> None:
    """q, out: of the prompts' rows."""
    lse = _attend_piece(prompts.own, q, layer, cache, out)
    if prompts.before:
        other = torch.empty_like(out)
    for piece in prompts.before:
        ops.merge_attention(out, lse, other, _attend_piece(piece, q, layer, cache, other))


def _attend_piece(piece: KeyPiece, q: Tensor, layer: LatentLayer, cache: ops.LatentCache, out: Tensor) -> Tensor:
    """Write out; return its log-sum-exp [tokens, num_q_heads]."""
    latents = q.new_empty(piece.num_rows, cache.rank + cache.rope_dim)
    ops.gather_latent(cache, piece.ranges, latents)
    num_heads, width = layer.kv_b.shape[:2]
    both = torch.mm(latents[:, : cache.rank], layer.kv_b.flatten(0, 1).t()).view(-1, num_heads, width)
    keys = ops.RaggedKeys(both[..., : layer.nope_dim], latents[:, cache.rank :], both[..., layer.nope_dim :])
    _, lse = ops.ragged_attention(q, keys, piece.metadata, scale=layer.scale, out=out)
    return lse


def step_latents(slots: ops.TokenSlots, latent: Tensor, layer: LatentLayer) -> ops.StepLatents:
    """What some tokens of a step store. latent: of these tokens, as projected."""
    return ops.StepLatents(latent, slots, layer.rope, layer.norm_weight, layer.norm_eps)
