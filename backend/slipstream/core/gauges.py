"""Gauges of what the scheduler, its cache and the requests hold now. Engine thread."""

from __future__ import annotations

from slipstream.core.request_memory import RequestMemory
from slipstream.core.scheduler import Scheduler
from slipstream.core.stats import Metric


def record_gauges(scheduler: Scheduler, request_memory: RequestMemory) -> None:
    """Update the gauges of its stats. O(live requests), O(blocks in use) if some leak: not to be called every step."""
    stats, cache = scheduler.stats, scheduler.cache
    live = list(scheduler.live_requests)
    num_prefilling = sum(request.num_computed_tokens < request.num_prompt_tokens for request in live)
    stats.set(Metric.REQUEST_BYTES, request_memory.num_bytes)
    stats.set(Metric.REQUESTS_MAX, scheduler.config.max_num_seqs)
    stats.set(Metric.KV_BLOCK_TOKENS, cache.block_size)
    stats.set(Metric.REQUESTS_RUNNING, scheduler.num_running)
    stats.set(Metric.REQUESTS_WAITING, scheduler.num_waiting)
    stats.set(Metric.REQUESTS_PREFILLING, num_prefilling - scheduler.num_waiting)  # those that wait have computed none
    stats.set(Metric.KV_BLOCKS_TOTAL, cache.num_blocks)
    stats.set(Metric.KV_BLOCKS_FREE, cache.num_free_blocks)
    stats.set(Metric.KV_BLOCKS_USED, cache.num_used_blocks)
    stats.set(Metric.KV_UTILIZATION, cache.num_used_blocks / max(1, cache.num_blocks))
    stats.set(Metric.KV_BLOCKS_LEAKED, cache.leaked_blocks(live))
    if cache.host is not None:
        cache.host.record(stats)
