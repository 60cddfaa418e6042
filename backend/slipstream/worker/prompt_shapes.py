"""Shapes of the CUDA graphs for steps with prompts, decodes before them; cuda_graphs.py captures and replays them.

Decode and prompt attention are different kernels over different rows, so such a graph has room for some decodes and,
behind it, for prompts. Its last layer computes the rows that are sampled, and no others. Knows arrays only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.worker.input_batch import StepArrays

# Tokens of the largest graph: eager launches of a layer's kernels take as long as its products of so many tokens.
MAX_TOKENS = 1280
TOKEN_STEP = 128  # whole tiles of products: a step pads to the next multiple
MAX_PROMPTS = 16
DECODE_ROOMS = (0, 32, 128, 256, 512)


@dataclass(frozen=True, order=True)
class PromptShape:
    """num_tokens: of all; the first num_decodes of them are those of requests of one token each."""

    num_tokens: int
    num_decodes: int
    num_prompts: int = MAX_PROMPTS

    @property
    def num_requests(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def max_query_len(self) -> int:
        return self.num_tokens - self.num_decodes

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes

    @property
    def max_decode_query_len(self) -> int:
        return min(1, self.num_decodes)

    @property
    def num_logits(self) -> int:
        return self.num_requests

    @property
    def is_tree(self) -> bool:
        return False

    def holds(self, step: StepArrays) -> bool:
        """Steps without drafts only: a request samples one token at most."""
        if len(step.token_ids) > self.num_tokens or step.tree_mask is not None:
            return False
        num_singles, num_requests = _num_singles(step), len(step.seq_lens)
        return (
            num_singles <= self.num_decodes
            and 0 < num_requests - num_singles <= self.num_prompts
            and len(step.token_ids) - num_singles <= self.max_query_len
            and len(step.logits_indices) <= num_requests
            and all(place < num_singles for place, _ in step.pending[-1:])
        )

    def spread(self, step: StepArrays) -> StepArrays:
        """The step with its prompts moved behind the room for decodes; who pads there sees and writes nothing."""
        first = _num_singles(step)
        gap = self.num_decodes - first
        if not gap:
            return step
        starts, tables = step.query_start_loc, step.block_tables
        filled = first + np.arange(1, gap + 1, dtype=starts.dtype)
        return replace(
            step,
            token_ids=_parted(step.token_ids, first, gap),
            positions=_parted(step.positions, first, gap),
            slot_mapping=_parted(step.slot_mapping, first, gap, -1),
            query_start_loc=np.concatenate([starts[: first + 1], filled, starts[first + 1 :] + gap]),
            seq_lens=_parted(step.seq_lens, first, gap),
            block_tables=np.concatenate(
                [tables[:first], np.zeros_like(tables, shape=(gap, tables.shape[1])), tables[first:]]
            ),
            logits_indices=step.logits_indices + gap * (step.logits_indices >= first),
        )


def prompt_shapes(decode_sizes: Sequence[int], max_num_tokens: int) -> list[PromptShape]:
    """The graphs for engines that have such graphs of decodes, ascending; none where decodes have none."""
    if not decode_sizes:
        return []
    most = max(decode_sizes)
    rooms = sorted({min(room, most) for room in DECODE_ROOMS})
    sizes = range(TOKEN_STEP, min(MAX_TOKENS, -(-max_num_tokens // TOKEN_STEP) * TOKEN_STEP) + 1, TOKEN_STEP)
    return sorted(PromptShape(size, room) for size in sizes for room in rooms if room < size)


def _num_singles(step: StepArrays) -> int:
    """How many requests at the head of a step have one token."""
    is_longer = np.diff(step.query_start_loc) > 1
    return int(is_longer.argmax()) if is_longer.any() else len(is_longer)


def _parted(values: np.ndarray, first: int, gap: int, padding: int = 0) -> np.ndarray:
    return np.concatenate([values[:first], np.full(gap, padding, dtype=values.dtype), values[first:]])
