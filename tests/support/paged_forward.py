"""Runs a Decoder over whole sequences through a paged cache, without scheduler and engine.

Each request owns a shuffled, non-contiguous set of blocks, which exposes errors in block tables and slots.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.kv_layout import LayerCache
from slipstream.worker.input_batch import num_short_queries
from slipstream_kernels import ops
from torch import Tensor


def poisoned(cache: LayerCache) -> LayerCache:
    """Set every bit: NaN in float types, fp8 and scales, which exposes reads of unwritten slots."""
    for tensor in cache.block_tensors if isinstance(cache, ops.KvCache) else (cache.rows,):
        tensor.view(torch.uint8).fill_(0xFF)
    return cache


class PagedForward:
    """Feeds several requests' tokens in any split into steps and collects the logits of every token."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        block_size: int = 4,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.decoder = decoder
        self.prompts = [list(prompt) for prompt in prompts]
        self.block_size = block_size
        self.num_computed_tokens = [0] * len(prompts)
        self.logits: list[list[Tensor]] = [[] for _ in prompts]
        num_blocks = [-(-len(prompt) // block_size) for prompt in prompts]
        blocks = list(range(sum(num_blocks) + 3))
        random.Random(seed).shuffle(blocks)
        self.block_ids = [[blocks.pop() for _ in range(count)] for count in num_blocks]
        context = decoder.context
        attentions = [layer.attention for layer in decoder.spec.of_rank(context.parallel).layers]
        dtype = kv_dtype or context.dtype
        self.kv_caches = [
            poisoned(own.kv_cache(own.kv_layout(dtype).empty(sum(num_blocks) + 3, block_size, context.device)))
            for own in attentions
        ]

    def step(self, num_scheduled_tokens: dict[int, int]) -> None:
        """One forward of that many next tokens of each named request."""
        batch = self._batch(num_scheduled_tokens)
        with torch.inference_mode():
            hidden = self.decoder.forward(batch, self.kv_caches)
            logits = self.decoder.logits(hidden[batch.logits_indices])
        for (request, count), rows in zip(
            num_scheduled_tokens.items(), logits.split(list(num_scheduled_tokens.values()))
        ):
            self.logits[request].append(rows)
            self.num_computed_tokens[request] += count

    def step_last(self, num_scheduled_tokens: dict[int, int], wanted: Sequence[int]) -> Tensor:
        """As `step`, but the last layer computes only the last rows of the wanted requests. Returns their logits."""
        batch = self._batch(num_scheduled_tokens)
        places = [place for place, request in enumerate(num_scheduled_tokens) if request in wanted]
        batch = replace(batch, logits_indices=batch.query_start_loc[1:][places].long() - 1)
        with torch.inference_mode():
            hidden = self.decoder.forward_last(batch, self.kv_caches)
            assert hidden.shape == (len(wanted), self.decoder.spec.hidden_size)
            logits = self.decoder.logits(hidden)
        for request, count in num_scheduled_tokens.items():
            self.num_computed_tokens[request] += count
        return logits

    def run(self, chunk_sizes: Sequence[int]) -> list[Tensor]:
        """All requests to their end, each step taking the next of the (cycled) chunk sizes from every request.

        Returns [num_tokens, vocab_size] of each request.
        """
        turn = 0
        while True:
            chunk = chunk_sizes[turn % len(chunk_sizes)]
            left = {i: len(p) - self.num_computed_tokens[i] for i, p in enumerate(self.prompts)}
            scheduled = {i: min(chunk, rest) for i, rest in left.items() if rest}
            if not scheduled:
                return self.results()
            self.step(scheduled)
            turn += 1

    def results(self) -> list[Tensor]:
        return [torch.cat(rows) for rows in self.logits]

    def _batch(self, num_scheduled_tokens: dict[int, int]) -> ForwardBatch:
        token_ids, positions, slots, starts, seq_lens = [], [], [], [0], []
        for request, count in num_scheduled_tokens.items():
            first = self.num_computed_tokens[request]
            for position in range(first, first + count):
                block = self.block_ids[request][position // self.block_size]
                token_ids.append(self.prompts[request][position])
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(token_ids))
            seq_lens.append(first + count)
        max_blocks = max(len(self.block_ids[request]) for request in num_scheduled_tokens)
        tables = [self.block_ids[r] + [-1] * (max_blocks - len(self.block_ids[r])) for r in num_scheduled_tokens]
        device = self.decoder.context.device
        counts = list(num_scheduled_tokens.values())
        num_decodes = num_short_queries(np.array(counts))
        return ForwardBatch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.tensor(positions, device=device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            logits_indices=torch.arange(len(token_ids), device=device),
            max_query_len=max(num_scheduled_tokens.values()),
            max_seq_len=max(seq_lens),
            num_decode_requests=num_decodes,
            num_decode_tokens=starts[num_decodes],
            max_decode_query_len=max([*counts[:num_decodes], 0]),
            prompt_prefixes=tuple(length - count for length, count in zip(seq_lens, counts))[num_decodes:],
        )
