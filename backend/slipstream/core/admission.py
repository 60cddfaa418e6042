"""Refuses requests that could never run here, even alone, and shows the arithmetic. Engine thread."""

from __future__ import annotations

from slipstream.core.config import SchedulerConfig
from slipstream.core.errors import RequestError
from slipstream.core.finish import StopConditions
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.request import Request


def check_fits(request: Request, config: SchedulerConfig, cache: KVCacheManager, max_model_len: int) -> StopConditions:
    """The request's stop conditions. Raises RequestError with field, value and limit if it can never run.

    A max_tokens beyond max_model_len is no error: the request then ends with "length".
    """
    num_prompt, budget = request.num_prompt_tokens, config.max_num_batched_tokens
    if num_prompt == 0:
        raise RequestError("prompt", "has no tokens, accepted: at least 1")
    if num_prompt >= max_model_len:
        accepted = f"accepted: at most {max_model_len - 1} (max_model_len={max_model_len} less one output token)"
        raise RequestError("prompt", f"has {num_prompt} tokens, {accepted}")
    if num_prompt > budget and not config.enable_chunked_prefill:
        accepted = f"accepted: at most max_num_batched_tokens={budget}, because enable_chunked_prefill is off"
        raise RequestError("prompt", f"has {num_prompt} tokens, {accepted}")
    stop = StopConditions(request, max_model_len)
    num_blocks = cache.num_blocks_for(stop.max_len)
    if num_blocks > cache.num_blocks:
        num_most = cache.num_blocks * cache.block_size - num_prompt
        accepted = f"accepted: at most {num_most}" if num_most > 0 else "shorten the prompt"
        raise RequestError(
            "max_tokens",
            f"got {request.params.max_tokens} after a prompt of {num_prompt} tokens: {stop.max_len} tokens need "
            f"{num_blocks} KV blocks of {cache.block_size}, there are {cache.num_blocks}; {accepted}",
        )
    return stop
