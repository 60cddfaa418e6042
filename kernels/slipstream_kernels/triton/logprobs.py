"""top_logprobs in Triton-lang: normaliser and rank in one pass over a row; the k best by torch.topk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _logprob_kernel(
    logits_ptr, chosen_ptr, log_normaliser_ptr, logprob_ptr, rank_ptr, row_stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * row_stride
    chosen = tl.load(logits_row + tl.load(chosen_ptr + row))
    columns = tl.arange(0, BLOCK)
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    num_better = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x = tl.load(logits_row + start + columns, mask=start + columns < vocab_size, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        # exp(-inf - -inf) is NaN: a row may begin with forbidden tokens only.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), axis=0)
        maximum = new_maximum
        num_better += tl.sum((x > chosen).to(tl.int32), axis=0)
    log_normaliser = maximum + tl.log(total)
    tl.store(log_normaliser_ptr + row, log_normaliser)
    tl.store(logprob_ptr + row, chosen - log_normaliser)
    tl.store(rank_ptr + row, (num_better + 1).to(tl.int64))


def top_logprobs(
    logits: torch.Tensor, k: int, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ops.top_logprobs."""
    num_rows, vocab_size = logits.shape
    log_normaliser = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    logprob, rank = torch.empty_like(log_normaliser), torch.empty_like(chosen)
    if num_rows:
        _logprob_kernel[(num_rows,)](
            logits, chosen, log_normaliser, logprob, rank, logits.stride(0), vocab_size, BLOCK=BLOCK, num_warps=8
        )
    values, token_ids = torch.topk(logits, k, dim=-1)
    return logprob, rank, values - log_normaliser[:, None], token_ids
