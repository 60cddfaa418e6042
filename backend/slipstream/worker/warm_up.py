"""Which steps a start on a GPU runs, so that the first requests find all kernels compiled."""

from __future__ import annotations

from slipstream.core.config import ModelConfig
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN


def warm_up_steps(max_num_tokens: int, config: ModelConfig) -> list[tuple[int, int]]:
    """Tokens of the steps that a start on a GPU runs, and the longest sequence that they are said to be of: prompts of
    the largest step, of medium and of short length, whose attention kernels differ, and one token, which layers of
    quantised weights read as it is: without graphs nothing else would compile the kernels of such steps. Kernels of
    prompts in FP8 differ by the sequence, too (prefill_stage.MIN_FP8_SEQ_LEN)."""
    sizes = max_num_tokens, 2 * MAX_DECODE_QUERY_LEN, 32, 1
    steps = [(size, size) for size in sizes]
    if config.prefill_attention_dtype == "fp8":
        whole = min(max_num_tokens, 2048)
        longest = 4 * max_num_tokens
        steps += [(whole, whole), (max_num_tokens, min(longest, config.max_model_len or longest))]
    return steps
