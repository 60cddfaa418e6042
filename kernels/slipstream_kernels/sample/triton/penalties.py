"""apply_penalties and apply_bias in Triton-lang: count seen tokens in a scratch table (integer atomics, whose result
does not depend on the order), then apply it in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream_kernels.sample.penalties import Penalties
from slipstream_kernels.triton.step_kernel import step_kernel

BLOCK = 1024
IN_PROMPT = tl.constexpr(1 << 30)


@step_kernel
def _count_kernel(
    token_ids_ptr, prompt_lens_ptr, num_tokens_ptr, counts_ptr, history_stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    prompt_len, num_tokens = tl.load(prompt_lens_ptr + row), tl.load(num_tokens_ptr + row)
    token_ids = tl.load(token_ids_ptr + row * history_stride + columns, mask=columns < num_tokens, other=0).to(tl.int64)
    seen = counts_ptr + row * vocab_size + token_ids
    tl.atomic_or(seen, IN_PROMPT, mask=columns < tl.minimum(prompt_len, num_tokens))
    tl.atomic_add(seen, 1, mask=(columns >= prompt_len) & (columns < num_tokens))


@triton.jit
def _penalise_kernel(
    logits_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, vocab_size,
    HAS_REPETITION: tl.constexpr, HAS_PRESENCE: tl.constexpr, HAS_FREQUENCY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    packed = tl.load(counts_ptr + row * vocab_size + columns, mask=mask, other=0)
    mask = mask & (packed != 0)
    x = tl.load(logits_ptr + row * vocab_size + columns, mask=mask, other=0.0)
    count = (packed & (IN_PROMPT - 1)).to(tl.float32)
    if HAS_REPETITION:
        repetition = tl.load(repetition_ptr + row)
        x = tl.where(x > 0, x / repetition, x * repetition)
    if HAS_FREQUENCY:
        x = x - tl.load(frequency_ptr + row) * count
    if HAS_PRESENCE:
        x = x - tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(logits_ptr + row * vocab_size + columns, x, mask=mask)


@step_kernel
def _bias_kernel(logits_ptr, rows_ptr, token_ids_ptr, values_ptr, vocab_size, num_biases, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_biases
    row, token_id = tl.load(rows_ptr + index, mask=mask, other=0), tl.load(token_ids_ptr + index, mask=mask, other=0)
    value = tl.load(values_ptr + index, mask=mask, other=0.0)
    tl.atomic_add(logits_ptr + row * vocab_size + token_id, value, mask=mask)


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    num_tokens: torch.Tensor,
    penalties: Penalties,
) -> None:
    """See ops.apply_penalties."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0 or token_ids.shape[1] == 0:
        return
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    _count_kernel[(num_rows, triton.cdiv(token_ids.shape[1], BLOCK))](
        token_ids, prompt_lens, num_tokens, counts, token_ids.stride(0), vocab_size, BLOCK=BLOCK, num_warps=4
    )
    _penalise_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        logits,
        counts,
        *penalties,
        vocab_size,
        HAS_REPETITION=penalties.repetition is not None,
        HAS_PRESENCE=penalties.presence is not None,
        HAS_FREQUENCY=penalties.frequency is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )


def apply_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """See ops.apply_bias."""
    num_biases = rows.shape[0]
    _bias_kernel[(triton.cdiv(num_biases, BLOCK),)](
        logits, rows, token_ids, values, logits.shape[1], num_biases, BLOCK=BLOCK, num_warps=4
    )
