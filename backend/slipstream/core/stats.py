"""The engine's metrics: their declarations, and the accumulator between engine thread and output thread.

The engine thread calls add, set, observe, observations, publish and writes last_step_time; the output thread calls
drain and nothing else. They meet in one slot that only the engine thread fills and only the output thread empties, so
there is no lock. Knows nothing of Triton: engine/main.py makes READY and METRICS frames of it.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.request import FinishReason


class MetricKind(enum.IntEnum):
    """Values are those of the wire protocol."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric(enum.IntEnum):
    """A metric's index in `METRICS`, in the READY frame and in METRICS frames; drafts by position, of the methods that
    are loaded, follow them."""

    REQUESTS_RUNNING = 0
    REQUESTS_WAITING = 1
    KV_BLOCKS_USED = 2
    KV_BLOCKS_FREE = 3
    KV_BLOCKS_TOTAL = 4
    KV_BLOCKS_LEAKED = 5
    LAST_STEP_AGE = 6
    PREFIX_QUERIES = 7
    PREFIX_HITS = 8
    PREEMPTIONS = 9
    PROMPT_TOKENS = 10
    GENERATION_TOKENS = 11
    CANCELLATIONS = 12
    DRAFTED_TOKENS = 13
    ACCEPTED_TOKENS = 14
    FINISHED_STOP = 15
    FINISHED_LENGTH = 16
    FINISHED_CANCELLED = 17
    FINISHED_TIMEOUT = 18
    FINISHED_ERROR = 19
    TTFT = 20
    ITL = 21
    QUEUE_TIME = 22
    E2E_TIME = 23
    STEP_TIME = 24
    KV_HOST_BLOCKS_USED = 25
    KV_HOST_BLOCKS_TOTAL = 26
    KV_BLOCKS_STORED = 27
    KV_BLOCKS_LOADED = 28
    REFUSED_INVALID = 29
    REFUSED_CAPACITY = 30
    REFUSED_INTERNAL = 31
    KV_UTILIZATION = 32
    KV_BLOCK_TOKENS = 33
    REQUESTS_MAX = 34
    REQUESTS_PREFILLING = 35
    NUM_STEPS = 36
    PREFILL_TIME = 37
    DECODE_TIME = 38
    REQUEST_PROMPT_TOKENS = 39
    REQUEST_GENERATION_TOKENS = 40
    REQUEST_SEQUENCES = 41
    SPANS_EXPORTED = 42
    SPANS_DROPPED = 43
    SLEEP_LEVEL = 44
    PROCESSOR_TIME = 45
    REQUEST_BYTES = 46


@dataclass(frozen=True)
class MetricSpec:
    """One line of /metrics: a family, one set of its labels, and the bucket bounds of a histogram (in its unit)."""

    family: str
    kind: MetricKind
    help: str
    labels: dict[str, str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


_TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
_QUEUE_BUCKETS = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
FINISHED_METRIC = {reason: Metric[f"FINISHED_{reason.name}"] for reason in FinishReason}


def _counter(family: str, help_text: str) -> MetricSpec:
    return MetricSpec(family, MetricKind.COUNTER, help_text)


def _gauge(family: str, help_text: str) -> MetricSpec:
    return MetricSpec(family, MetricKind.GAUGE, help_text)


def _histogram(family: str, buckets: tuple[float, ...], help_text: str) -> MetricSpec:
    return MetricSpec(family, MetricKind.HISTOGRAM, help_text, buckets=buckets)


def _finished(reason: FinishReason) -> MetricSpec:
    help_text = "Sequences that ended, by finish reason"
    return MetricSpec("slipstream_requests_finished_total", MetricKind.COUNTER, help_text, {"reason": reason.value})


def _refused(reason: str) -> MetricSpec:
    help_text = "Requests that never became sequences, by the code of their error"
    return MetricSpec("slipstream_requests_refused_total", MetricKind.COUNTER, help_text, {"reason": reason})


_SPECS: dict[Metric, MetricSpec] = {
    Metric.REQUESTS_RUNNING: _gauge("slipstream_requests_running", "Sequences that hold KV blocks and are computed"),
    Metric.REQUESTS_WAITING: _gauge("slipstream_requests_waiting", "Sequences that wait, preempted ones included"),
    Metric.KV_BLOCKS_USED: _gauge("slipstream_kv_blocks_used", "KV blocks that a running sequence holds"),
    Metric.KV_BLOCKS_FREE: _gauge("slipstream_kv_blocks_free", "KV blocks free or evictable from the prefix cache"),
    Metric.KV_BLOCKS_TOTAL: _gauge("slipstream_kv_blocks_total", "KV blocks of the pool"),
    Metric.KV_BLOCKS_LEAKED: _gauge("slipstream_kv_blocks_leaked", "KV blocks in use that no sequence holds: always 0"),
    Metric.LAST_STEP_AGE: _gauge(
        "slipstream_last_step_age_seconds", "Seconds since the engine finished a step while it has work; 0 when idle"
    ),
    Metric.PREFIX_QUERIES: _counter(
        "slipstream_prefix_cache_queries_tokens_total", "Tokens looked up in the prefix cache"
    ),
    Metric.PREFIX_HITS: _counter("slipstream_prefix_cache_hits_tokens_total", "Tokens found in the prefix cache"),
    Metric.PREEMPTIONS: _counter("slipstream_preemptions_total", "Sequences preempted because KV blocks ran out"),
    Metric.PROMPT_TOKENS: _counter("slipstream_prompt_tokens_total", "Prompt tokens of sequences that were started"),
    Metric.GENERATION_TOKENS: _counter("slipstream_generation_tokens_total", "Tokens generated"),
    Metric.CANCELLATIONS: _counter("slipstream_cancellations_total", "Sequences cancelled by their client"),
    Metric.DRAFTED_TOKENS: _counter("slipstream_spec_drafted_tokens_total", "Draft tokens verified"),
    Metric.ACCEPTED_TOKENS: _counter("slipstream_spec_accepted_tokens_total", "Draft tokens accepted"),
    Metric.FINISHED_STOP: _finished(FinishReason.STOP),
    Metric.FINISHED_LENGTH: _finished(FinishReason.LENGTH),
    Metric.FINISHED_CANCELLED: _finished(FinishReason.CANCELLED),
    Metric.FINISHED_TIMEOUT: _finished(FinishReason.TIMEOUT),
    Metric.FINISHED_ERROR: _finished(FinishReason.ERROR),
    Metric.TTFT: _histogram(
        "slipstream_time_to_first_token_seconds", _TTFT_BUCKETS, "Seconds from arrival to the first token"
    ),
    Metric.ITL: _histogram(
        "slipstream_inter_token_latency_seconds", _ITL_BUCKETS, "Seconds between tokens of a sequence"
    ),
    Metric.QUEUE_TIME: _histogram(
        "slipstream_queue_time_seconds", _QUEUE_BUCKETS, "Seconds from arrival to the first step"
    ),
    Metric.E2E_TIME: _histogram(
        "slipstream_request_duration_seconds", _REQUEST_BUCKETS, "Seconds from arrival to the end"
    ),
    Metric.STEP_TIME: _histogram("slipstream_step_duration_seconds", _ITL_BUCKETS, "Seconds of one engine step"),
    Metric.KV_HOST_BLOCKS_USED: _gauge("slipstream_kv_host_blocks_used", "KV blocks kept in host memory"),
    Metric.KV_HOST_BLOCKS_TOTAL: _gauge("slipstream_kv_host_blocks_total", "KV blocks that host memory can keep"),
    Metric.KV_BLOCKS_STORED: _counter("slipstream_kv_blocks_stored_total", "KV blocks copied to host memory"),
    Metric.KV_BLOCKS_LOADED: _counter("slipstream_kv_blocks_loaded_total", "KV blocks copied back from host memory"),
    Metric.REFUSED_INVALID: _refused("invalid_arg"),
    Metric.REFUSED_CAPACITY: _refused("unavailable"),
    Metric.REFUSED_INTERNAL: _refused("internal"),
    Metric.KV_UTILIZATION: _gauge("slipstream_kv_utilization", "Share of the KV blocks in use, from 0 to 1"),
    Metric.KV_BLOCK_TOKENS: _gauge("slipstream_kv_block_tokens", "Tokens of a KV block"),
    Metric.REQUESTS_MAX: _gauge("slipstream_requests_max", "Sequences that may run at once"),
    Metric.REQUESTS_PREFILLING: _gauge(
        "slipstream_requests_prefilling", "Running sequences whose prompt is not computed yet"
    ),
    Metric.NUM_STEPS: _gauge("slipstream_engine_steps", "Steps since the engine started"),
    Metric.PREFILL_TIME: _histogram(
        "slipstream_prefill_time_seconds", _TTFT_BUCKETS, "Seconds from the first step to the first token"
    ),
    Metric.DECODE_TIME: _histogram(
        "slipstream_decode_time_seconds", _REQUEST_BUCKETS, "Seconds from the first token to the last"
    ),
    Metric.REQUEST_PROMPT_TOKENS: _histogram(
        "slipstream_request_prompt_tokens", _LENGTH_BUCKETS, "Prompt tokens of a sequence that ended"
    ),
    Metric.REQUEST_GENERATION_TOKENS: _histogram(
        "slipstream_request_generation_tokens", _LENGTH_BUCKETS, "Generated tokens of a sequence that ended"
    ),
    Metric.REQUEST_SEQUENCES: _histogram(
        "slipstream_request_sequences", (1.0, 2.0, 5.0, 10.0, 20.0), "Sequences that a request asked for (`n`)"
    ),
    Metric.SPANS_EXPORTED: _counter("slipstream_spans_exported_total", "Spans that the collector of traces has taken"),
    Metric.SPANS_DROPPED: _counter(
        "slipstream_spans_dropped_total", "Spans lost because the collector of traces was away or too slow"
    ),
    Metric.SLEEP_LEVEL: _gauge("slipstream_sleep_level", "0 awake, 1 asleep with weights in host memory, 2 without"),
    Metric.PROCESSOR_TIME: _histogram(
        "slipstream_logits_processor_seconds", _ITL_BUCKETS, "Seconds of the host in logits processors, by step"
    ),
    Metric.REQUEST_BYTES: _gauge(
        "slipstream_request_memory_bytes", "Host memory of requests that wait or run, of those above 65536 bytes"
    ),
}
_METHODS = tuple(DRAFT_METHODS.names())
_NUM_POSITIONS = 8  # draft positions with a counter each; the last counts all later positions too
_POSITIONS = [f"{position}" for position in range(1, _NUM_POSITIONS)] + [f"{_NUM_POSITIONS}+"]
_FIRST_POSITION = {method: len(Metric) + index * _NUM_POSITIONS for index, method in enumerate(_METHODS)}
_NUM_DRAFTED = len(_METHODS) * _NUM_POSITIONS  # counters of drafted positions, before those of accepted ones
_POSITION_FAMILIES = (
    ("slipstream_spec_position_drafted_total", "Verifications whose drafts reached this position, by method"),
    ("slipstream_spec_position_accepted_total", "Verifications that accepted a draft at this position, by method"),
)
_BY_POSITION = tuple(
    MetricSpec(family, MetricKind.COUNTER, help_text, {"method": method, "position": position})
    for family, help_text in _POSITION_FAMILIES
    for method in _METHODS
    for position in _POSITIONS
)
_REFUSED_METRIC: dict[type[Exception], Metric] = {
    RequestError: Metric.REFUSED_INVALID,
    CapacityError: Metric.REFUSED_CAPACITY,
}
METRICS: tuple[MetricSpec, ...] = (*(_SPECS[metric] for metric in Metric), *_BY_POSITION)


def drafted_metric(method: str, position: int) -> int:
    """Index of a method's counter of verified drafts at a position (from 1)."""
    return _FIRST_POSITION[method] + min(position, _NUM_POSITIONS) - 1


def accepted_metric(method: str, position: int) -> int:
    """Index of a method's counter of accepted drafts at a position (from 1)."""
    return drafted_metric(method, position) + _NUM_DRAFTED


class _Values:
    """Values since the last `publish`."""

    __slots__ = ("counts", "gauges", "observations")

    def __init__(self) -> None:
        self.counts: dict[int, float] = {}
        self.gauges: dict[int, float] = {}
        self.observations: dict[int, list[float]] = {}


class Repeats(Protocol):
    """core/metric_aliases.py. specs: of the metrics with the indices from len(METRICS) on."""

    specs: tuple[MetricSpec, ...]

    def repeat(self, news: Sequence[tuple[int, list[float]]]) -> list[tuple[int, list[float]]]: ...


class Stats:
    """Accumulates on the engine thread, drains on the output thread. `count` and `count_refusal` are for any thread.

    aliases: further metrics that repeat these. methods: those of speculation that are loaded; of others nothing is
    said. specs: what `drain` reports, by index.
    """

    def __init__(self, aliases: Repeats | None = None, methods: Collection[str] = _METHODS) -> None:
        specs = (*METRICS, *(aliases.specs if aliases is not None else ()))
        told = [index for index, spec in enumerate(specs) if spec.labels.get("method", "") in ("", *methods)]
        self.specs = tuple(specs[index] for index in told)
        self._places = {index: place for place, index in enumerate(told)}
        self._aliases = aliases
        self.last_step_time = 0.0  # time.monotonic() of the last step's end or of the first arrival; 0.0 when idle
        self._values = _Values()
        self._mailbox: _Values | None = None
        self._counted: deque[tuple[Metric, int]] = deque()

    def count_refusal(self, fault: type[Exception]) -> None:
        """Count a request that was answered with an error before it became a sequence."""
        self.count(_REFUSED_METRIC.get(fault, Metric.REFUSED_INTERNAL), 1)

    def count(self, metric: Metric, increment: int) -> None:
        """Increase a counter; any thread."""
        if increment:
            self._counted.append((metric, increment))

    # ---- engine thread

    def add(self, metric: int, increment: float = 1) -> None:
        """Increase a counter."""
        counts = self._values.counts
        counts[metric] = counts.get(metric, 0) + increment

    def set(self, metric: Metric, value: float) -> None:
        """Set a gauge."""
        self._values.gauges[metric] = value

    def observe(self, metric: Metric, value: float) -> None:
        """Add one value, in the histogram's unit."""
        seen = self._values.observations.get(metric)
        if seen is None:
            self._values.observations[metric] = [value]
        else:
            seen.append(value)

    def observations(self, metric: Metric) -> list[float]:
        """The list that `observe` appends to; valid until the next publish."""
        return self._values.observations.setdefault(metric, [])

    def publish(self) -> None:
        """Hand the values to the output thread; keep accumulating if it has not drained the last ones.

        Called at the end of every step and on every idle iteration of the engine loop.
        """
        while self._counted:
            self.add(*self._counted.popleft())
        values = self._values
        if self._mailbox is None and (values.counts or values.gauges or values.observations):
            self._values = _Values()
            self._mailbox = values

    # ---- output thread

    def drain(self) -> list[tuple[int, list[float]]]:
        """(metric index, values) as METRICS frames carry them: [increment], [gauge value] or the observations."""
        values = self._mailbox
        if values is not None:  # do not clear an empty slot: the engine thread may be filling it
            self._mailbox = None
        last_step_time = self.last_step_time
        age = max(0.0, time.monotonic() - last_step_time) if last_step_time else 0.0
        news: list[tuple[int, list[float]]] = [(int(Metric.LAST_STEP_AGE), [age])]
        if values is not None:
            for scalars in (values.counts, values.gauges):
                news.extend((int(metric), [float(value)]) for metric, value in scalars.items())
            news.extend((int(metric), seen) for metric, seen in values.observations.items() if seen)
        if self._aliases is not None:
            news += self._aliases.repeat(news)
        return [(self._places[metric], values) for metric, values in news]
