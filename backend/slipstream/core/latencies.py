"""Time stamps and latency metrics of a step's tokens. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.outputs import StepOutput
from slipstream.core.stats import Metric, Stats


def note_times(stats: Stats, outputs: Sequence[StepOutput], now_ns: int) -> None:
    """Update each request's times and observe TTFT and ITL. Tokens of one step share the time since the last one."""
    latencies = stats.observations(Metric.ITL)
    num_generated = 0
    for output in outputs:
        times = output.request.times
        num_new = len(output.new_token_ids)
        num_generated += num_new
        if times.last_token_ns:
            latency = (now_ns - times.last_token_ns) * 1e-9 / num_new
            if num_new == 1:
                latencies.append(latency)
            else:
                latencies.extend([latency] * num_new)
        else:
            times.first_token_ns = now_ns
            if times.arrival_ns:
                stats.observe(Metric.TTFT, max(0, now_ns - times.arrival_ns) * 1e-9)
        times.last_token_ns = now_ns
    stats.add(Metric.GENERATION_TOKENS, num_generated)
