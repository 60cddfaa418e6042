"""Makes StepArrays for tests."""

from __future__ import annotations

import numpy as np
from slipstream.worker.input_batch import StepArrays


def step_of(lengths: list[int], num_decodes: int | None = None, tree: bool = False) -> StepArrays:
    """A step of requests with these numbers of tokens after ten cached ones; all are sampled."""
    total, ends = sum(lengths), np.cumsum(lengths)
    return StepArrays(
        token_ids=np.arange(total) + 100,
        positions=np.concatenate([10 + np.arange(length) for length in lengths]),
        query_start_loc=np.concatenate([[0], ends]).astype(np.int32),
        seq_lens=10 + np.array(lengths, dtype=np.int32),
        block_tables=np.arange(len(lengths) * 2, dtype=np.int32).reshape(len(lengths), 2),
        slot_mapping=np.arange(total) + 1000,
        logits_indices=ends - 1,
        max_query_len=max(lengths),
        num_decode_requests=len(lengths) if num_decodes is None else num_decodes,
        tree_mask=np.arange(total) if tree else None,
    )
