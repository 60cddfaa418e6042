"""top_logprobs: contract and choice.  Log-probabilities of a chosen token and its best alternatives."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select


class TopLogprobs(NamedTuple):
    """chosen: [num_rows] fp32; rank: [num_rows] int64, 1 = the most likely; values, token_ids:
    [num_rows, k] fp32, int64.
    """

    chosen: torch.Tensor
    rank: torch.Tensor
    values: torch.Tensor
    token_ids: torch.Tensor


def top_logprobs(logits: torch.Tensor, k: int, chosen: torch.Tensor, *, backend: str = "auto") -> TopLogprobs:
    """Log-softmax of the chosen token, its rank (1 + number of strictly more likely tokens), and the k most likely
    tokens.

    logits: [num_rows, vocab_size] fp32, bf16 or fp16.  chosen: [num_rows] int64.  k: 0..vocab_size; best first, the
    order of equal ones is unspecified.
    """
    require_float("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected [num_rows, vocab_size]")
    require_unit_stride("logits", logits)
    require_shape("chosen", chosen, (logits.shape[0],))
    if chosen.dtype != torch.int64:
        raise ValueError(f"chosen: dtype {chosen.dtype}, expected int64")
    if not 0 <= k <= logits.shape[1]:
        raise ValueError(f"k: {k}, expected 0..{logits.shape[1]}")
    return TopLogprobs(*select("sample.logprobs", backend, logits).top_logprobs(logits, k, chosen))
