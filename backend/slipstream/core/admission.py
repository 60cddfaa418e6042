"""Admission: which requests can ever run here, how many may wait, and how many blocks the running ones are promised.

Engine thread, but for the two checks, which the thread that brings a request calls too. Refusals show the arithmetic.
"""

from __future__ import annotations

from slipstream.core.config import SCHEDULER_POLICIES, SchedulerConfig
from slipstream.core.errors import CapacityError, ConfigError, RequestError
from slipstream.core.finish import StopConditions
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.request import Request


class Admission:
    """Knows no queue: the scheduler says how many requests run and wait, and calls `promise` and `release` for each
    request that starts and gives back its blocks.

    Raises ConfigError for an unknown policy. guaranteed_no_evict starts a request only if all blocks that it can come
    to need are free of promises; max_utilization starts it as soon as its tokens have blocks, and may preempt it.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, max_model_len: int) -> None:
        if config.policy not in SCHEDULER_POLICIES:
            raise ConfigError("policy", config.policy, f"accepted: {', '.join(SCHEDULER_POLICIES)}")
        self._config, self._cache, self._max_model_len = config, cache, max_model_len
        self.never_evicts = config.policy == "guaranteed_no_evict"
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens)  # a request is a token or more
        self._num_promised_blocks = 0  # worst-case blocks of all running requests

    # ---- checks

    def check_fits(self, request: Request) -> StopConditions:
        """The request's stop conditions. Raises RequestError with field, value and limit if it can never run.

        A max_tokens beyond max_model_len is no error: the request then ends with "length".
        """
        self._check_prompt(request.num_prompt_tokens)
        if request.params.beam_width > 1:
            self._check_beams(request.params.beam_width)
        stop, cache = StopConditions(request, self._max_model_len), self._cache
        num_blocks = cache.num_blocks_for(stop.max_slots)
        if num_blocks > cache.num_blocks:
            num_prompt, size = request.num_prompt_tokens, cache.block_size
            num_most = cache.max_tokens - num_prompt + 1
            accepted = f"accepted: at most {num_most}" if num_most > 0 else "shorten the prompt"
            raise RequestError(
                "max_tokens",
                f"got {request.params.max_tokens} after a prompt of {num_prompt} tokens: {stop.max_slots} tokens, all "
                f"but the last, need {num_blocks} KV blocks of {size}, there are {cache.num_blocks}; {accepted}",
            )
        return stop

    def _check_prompt(self, num_tokens: int) -> None:
        longest, budget = self._max_model_len - 1, self._config.max_num_batched_tokens
        if num_tokens == 0:
            raise RequestError("prompt", "has no tokens, accepted: at least 1")
        if num_tokens > longest:
            accepted = f"accepted: at most {longest} (max_model_len={self._max_model_len} less one output token)"
            raise RequestError("prompt", f"has {num_tokens} tokens, {accepted}")
        if num_tokens > budget and not self._config.enable_chunked_prefill:
            accepted = f"accepted: at most max_num_batched_tokens={budget}, because enable_chunked_prefill is off"
            raise RequestError("prompt", f"has {num_tokens} tokens, {accepted}")

    def _check_beams(self, width: int) -> None:
        if width > self._config.max_beam_width:
            accepted = f"accepted: at most max_beam_width={self._config.max_beam_width}, a parameter of the model"
            raise RequestError("beam_width", f"got {width}, {accepted}")
        if not self._cache.enable_prefix_caching:
            raise RequestError("beam_width", f"got {width}, accepted: 0 or 1, because enable_prefix_caching is off")

    def check_capacity(self, num_sequences: int, num_running: int, num_waiting: int) -> None:
        """Raises CapacityError above the admission limit, RequestError if an idle model could not take so many."""
        most_waiting = self._config.max_waiting_requests
        if num_sequences > self.max_running + most_waiting:
            accepted = f"at most {self.max_running + most_waiting}, max_num_seqs and max_waiting_requests"
            raise RequestError("n", f"got {num_sequences}, accepted: {accepted} together")
        num_free = max(0, self.max_running - num_running)
        if num_waiting + num_sequences > most_waiting + num_free:
            raise CapacityError(
                f"{num_running} requests are running and {num_waiting} waiting; "
                f"max_num_seqs={self._config.max_num_seqs}, max_waiting_requests={most_waiting}"
            )

    # ---- blocks

    def promise(self, request: Request) -> None:
        self._num_promised_blocks += self._worst_blocks(request)

    def release(self, request: Request) -> None:
        self._num_promised_blocks -= self._worst_blocks(request)

    def num_spare_blocks(self, request: Request, num_running: int) -> int:
        """Blocks that must stay free when this request starts beside `num_running` others."""
        if self.never_evicts:
            return self._num_owed_blocks(request)
        # before a preempted request resumes, one per running request, or it is preempted again at once
        return num_running * self._cache.groups.num_groups if request.num_preemptions else 0

    def most_slots(self, request: Request) -> int:
        """Tokens, drafts included, that the request may have KV slots for."""
        return request.stop_conditions.max_slots if self.never_evicts else self._max_model_len

    def _num_owed_blocks(self, request: Request) -> int:
        """All blocks that the running requests and this one may still allocate once it is admitted.

        Promised minus held blocks is exact under prefix sharing, because each sharer of a block promises and holds a
        reference of its own. Windows release shared blocks that other sharers keep, so with windowed groups the
        promises alone must fit.
        """
        cache, num_promised = self._cache, self._num_promised_blocks + self._worst_blocks(request)
        if cache.windows is not None:
            return 0 if num_promised <= cache.num_blocks else cache.num_blocks
        return num_promised - cache.pool.num_references - cache.num_blocks_for(request.num_tokens)

    def _worst_blocks(self, request: Request) -> int:
        return self._cache.num_blocks_for(request.stop_conditions.max_slots)
