"""Time stamps and latency metrics of a step's tokens and of ended requests. Engine thread."""

from __future__ import annotations

import time
from collections.abc import Mapping

from slipstream.core.outputs import DecodedTokens
from slipstream.core.request import FinishReason, Request
from slipstream.core.stats import FINISHED_METRIC, Metric, Stats


def note_start(stats: Stats, request: Request, num_looked_up: int, num_cached: int) -> None:
    """Count the tokens looked up in the prefix cache and found there, and, when a request starts for the first time,
    its prompt and how long it has waited."""
    stats.add(Metric.PREFIX_QUERIES, num_looked_up)
    stats.add(Metric.PREFIX_HITS, num_cached)
    times = request.times
    if times.first_scheduled_ns == 0:
        times.first_scheduled_ns = time.time_ns()
        stats.add(Metric.PROMPT_TOKENS, request.num_prompt_tokens)
        if times.arrival_ns:
            stats.observe(Metric.QUEUE_TIME, max(0, times.first_scheduled_ns - times.arrival_ns) * 1e-9)


def note_times(stats: Stats, sampled: DecodedTokens, now_ns: int) -> None:
    """Update each request's times and observe TTFT and ITL. Tokens of one step share the time since the last one."""
    alike: dict[tuple[int, int], int] = {}  # requests by the time of the last token and number of new ones
    for request, new_token_ids in zip(sampled.requests, sampled.token_ids):
        times = request.times
        group = times.last_token_ns, len(new_token_ids)
        alike[group] = alike.get(group, 0) + 1
        if not times.last_token_ns:
            times.first_token_ns = now_ns
            if times.arrival_ns:
                stats.observe(Metric.TTFT, max(0, now_ns - times.arrival_ns) * 1e-9)
        times.last_token_ns = now_ns
    _note_alike(stats, alike, now_ns)
    for index in sampled.ended:
        note_lengths(stats, sampled.requests[index])


def note_alike_times(
    stats: Stats, sampled: DecodedTokens, counts: Mapping[int, int], last_ns: int, now_ns: int
) -> None:
    """The same for requests that all had their last token at last_ns, and have their times already. counts: requests by
    their number of new tokens."""
    _note_alike(stats, {(last_ns, num_new): count for num_new, count in counts.items()}, now_ns)
    for index in sampled.ended:
        note_lengths(stats, sampled.requests[index])


def _note_alike(stats: Stats, alike: Mapping[tuple[int, int], int], now_ns: int) -> None:
    """alike: requests by the time of the last token and number of new ones."""
    latencies, num_generated = stats.observations(Metric.ITL), 0
    for (last_ns, num_new), count in alike.items():
        num_generated += count * num_new
        if last_ns:
            latencies += [(now_ns - last_ns) * 1e-9 / num_new] * (count * num_new)
    stats.add(Metric.GENERATION_TOKENS, num_generated)


def note_decodes(stats: Stats, count: int, last_ns: int, now_ns: int) -> None:
    """The same for `count` requests with one more token each, all `last_ns` after; their times are set already."""
    stats.observations(Metric.ITL).extend([(now_ns - last_ns) * 1e-9] * count)
    stats.add(Metric.GENERATION_TOKENS, count)


def note_lengths(stats: Stats, request: Request) -> None:
    """Observe what a sequence was that ended by a token of its own. A step of a beam search is none."""
    if request.search is not None:
        return
    times = request.times
    stats.observe(Metric.PREFILL_TIME, max(0, times.first_token_ns - times.first_scheduled_ns) * 1e-9)
    stats.observe(Metric.DECODE_TIME, max(0, times.last_token_ns - times.first_token_ns) * 1e-9)
    stats.observe(Metric.REQUEST_PROMPT_TOKENS, request.num_prompt_tokens)
    stats.observe(Metric.REQUEST_GENERATION_TOKENS, request.num_output_tokens)
    if request.sequence_index == 0:
        stats.observe(Metric.REQUEST_SEQUENCES, request.params.n)


def note_end(stats: Stats, request: Request) -> None:
    """Count an ended sequence, however it ended, and observe its duration. A step of a beam search is none."""
    if request.search is not None:
        return
    reason = request.finish_reason
    assert reason is not None
    stats.add(FINISHED_METRIC[reason])
    if reason is FinishReason.CANCELLED:
        stats.add(Metric.CANCELLATIONS)
    if request.times.arrival_ns:
        stats.observe(Metric.E2E_TIME, max(0, time.time_ns() - request.times.arrival_ns) * 1e-9)
