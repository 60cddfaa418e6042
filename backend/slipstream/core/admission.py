"""Refuses requests that could never run here, even alone, and shows the arithmetic. Engine thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.config import SchedulerConfig
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.finish import StopConditions
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.request import Request

if TYPE_CHECKING:
    from slipstream.core.scheduler import Scheduler


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
    if request.params.beam_width > 1:
        _check_beams(request.params.beam_width, config, cache)
    stop = StopConditions(request, max_model_len)
    num_blocks = cache.num_blocks_for(stop.max_len)
    if num_blocks > cache.num_blocks:
        num_most = cache.max_tokens - num_prompt
        accepted = f"accepted: at most {num_most}" if num_most > 0 else "shorten the prompt"
        raise RequestError(
            "max_tokens",
            f"got {request.params.max_tokens} after a prompt of {num_prompt} tokens: {stop.max_len} tokens need "
            f"{num_blocks} KV blocks of {cache.block_size}, there are {cache.num_blocks}; {accepted}",
        )
    return stop


def check_capacity(scheduler: Scheduler, num_arriving: int, num_sequences: int) -> None:
    """Raises CapacityError above the admission limit, RequestError if an idle model could not take the request.

    num_arriving: sequences that the scheduler has not got yet."""
    limits, num_waiting = scheduler.config, scheduler.num_waiting + num_arriving
    most_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    if num_sequences > most_running + limits.max_waiting_requests:
        accepted = f"at most {most_running + limits.max_waiting_requests}, max_num_seqs and max_waiting_requests"
        raise RequestError("n", f"got {num_sequences}, accepted: {accepted} together")
    num_free = max(0, most_running - scheduler.num_running)
    if num_waiting + num_sequences > limits.max_waiting_requests + num_free:
        raise CapacityError(
            f"{scheduler.num_running} requests are running and {num_waiting} waiting; "
            f"max_num_seqs={limits.max_num_seqs}, max_waiting_requests={limits.max_waiting_requests}"
        )


def _check_beams(width: int, config: SchedulerConfig, cache: KVCacheManager) -> None:
    if width > config.max_beam_width:
        accepted = f"accepted: at most max_beam_width={config.max_beam_width}, a parameter of the model"
        raise RequestError("beam_width", f"got {width}, {accepted}")
    if not cache.enable_prefix_caching:
        raise RequestError("beam_width", f"got {width}, accepted: 0 or 1, because enable_prefix_caching is off")


def num_owed_blocks(request: Request, cache: KVCacheManager, num_promised: int, num_worst: int) -> int:
    """guaranteed_no_evict: all blocks that the running requests and this one may still allocate once it is admitted.

    num_promised: worst-case blocks of the running requests; num_worst: of this one. Promised minus held blocks is exact
    under prefix sharing, because each sharer of a block promises and holds a reference of its own. Windows release
    shared blocks that other sharers keep, so with windowed groups the promises alone must fit.
    """
    if cache.windows is not None:
        return 0 if num_promised + num_worst <= cache.num_blocks else cache.num_blocks
    return num_promised - cache.pool.num_references + num_worst - cache.num_blocks_for(request.num_tokens)


def most_decodes(num_running: int, num_microbatches: int) -> int:
    """How many requests may decode in a step, so that each of the steps in flight gets some of them."""
    return -(-num_running // num_microbatches)
