"""The engine's metrics under the names of vLLM and of TensorRT-LLM's backend, for their dashboards and autoscalers.

An alias repeats a metric of stats.py, or combines gauges of it, and costs no work where the metric is recorded. Output
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.core.config import ALIAS_SETS, NO_ALIASES, ServingConfig
from slipstream.core.stats import METRICS, Metric, MetricKind, MetricSpec

_Gauges = Mapping[int, float]


@dataclass(frozen=True)
class Alias:
    """source: the metric that it repeats; or value, of all gauges, which `meaning` tells. labels: beside model and
    version."""

    family: str
    source: Metric | None = None
    value: Callable[[_Gauges], float] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    meaning: str = ""

    @property
    def spec(self) -> MetricSpec:
        of = METRICS[self.source] if self.source is not None else None
        kind, buckets = (of.kind, of.buckets) if of is not None else (MetricKind.GAUGE, ())
        return MetricSpec(self.family, kind, f"Alias: {describe(self)}", dict(self.labels), buckets)


def describe(alias: Alias) -> str:
    """What the alias repeats, for its help text and for docs/metrics.md."""
    if alias.source is None:
        return alias.meaning
    metric = METRICS[alias.source]
    labels = ", ".join(f'{name}="{value}"' for name, value in metric.labels.items())
    return f"{metric.family}{{{labels}}}" if labels else metric.family


def _finished(reason: str, metric: Metric) -> Alias:
    return Alias("vllm:request_success_total", metric, labels={"finished_reason": reason})


_VLLM = (
    Alias("vllm:num_requests_running", Metric.REQUESTS_RUNNING),
    Alias("vllm:num_requests_waiting", Metric.REQUESTS_WAITING),
    Alias("vllm:kv_cache_usage_perc", Metric.KV_UTILIZATION),
    Alias("vllm:gpu_cache_usage_perc", Metric.KV_UTILIZATION),  # the name before 0.10, which autoscalers still read
    Alias("vllm:num_preemptions_total", Metric.PREEMPTIONS),
    Alias("vllm:prompt_tokens_total", Metric.PROMPT_TOKENS),
    Alias("vllm:generation_tokens_total", Metric.GENERATION_TOKENS),
    Alias("vllm:prefix_cache_queries_total", Metric.PREFIX_QUERIES),
    Alias("vllm:prefix_cache_hits_total", Metric.PREFIX_HITS),
    Alias("vllm:gpu_prefix_cache_queries_total", Metric.PREFIX_QUERIES),
    Alias("vllm:gpu_prefix_cache_hits_total", Metric.PREFIX_HITS),
    _finished("stop", Metric.FINISHED_STOP),
    _finished("length", Metric.FINISHED_LENGTH),
    _finished("abort", Metric.FINISHED_CANCELLED),
    _finished("timeout", Metric.FINISHED_TIMEOUT),
    _finished("error", Metric.FINISHED_ERROR),
    Alias("vllm:time_to_first_token_seconds", Metric.TTFT),
    Alias("vllm:time_per_output_token_seconds", Metric.ITL),
    Alias("vllm:inter_token_latency_seconds", Metric.ITL),
    Alias("vllm:e2e_request_latency_seconds", Metric.E2E_TIME),
    Alias("vllm:request_queue_time_seconds", Metric.QUEUE_TIME),
    Alias("vllm:request_prefill_time_seconds", Metric.PREFILL_TIME),
    Alias("vllm:request_decode_time_seconds", Metric.DECODE_TIME),
    Alias("vllm:request_prompt_tokens", Metric.REQUEST_PROMPT_TOKENS),
    Alias("vllm:request_generation_tokens", Metric.REQUEST_GENERATION_TOKENS),
    Alias("vllm:request_params_n", Metric.REQUEST_SEQUENCES),
    Alias("vllm:spec_decode_num_draft_tokens_total", Metric.DRAFTED_TOKENS),
    Alias("vllm:spec_decode_num_accepted_tokens_total", Metric.ACCEPTED_TOKENS),
)


def _difference(gauges: _Gauges) -> float:
    return gauges.get(Metric.REQUESTS_RUNNING, 0.0) - gauges.get(Metric.REQUESTS_PREFILLING, 0.0)


def _sum(gauges: _Gauges) -> float:
    return gauges.get(Metric.REQUESTS_RUNNING, 0.0) + gauges.get(Metric.REQUESTS_WAITING, 0.0)


def _trt_requests(kind: str, source: Metric) -> Alias:
    return Alias("nv_trt_llm_request_metrics", source, labels={"request_type": kind})


def _trt_blocks(kind: str, source: Metric) -> Alias:
    return Alias("nv_trt_llm_kv_cache_block_metrics", source, labels={"kv_cache_block_type": kind})


_TENSORRT_LLM = (
    _trt_requests("waiting", Metric.REQUESTS_WAITING),
    _trt_requests("context", Metric.REQUESTS_PREFILLING),
    _trt_requests("scheduled", Metric.REQUESTS_RUNNING),
    Alias(
        "nv_trt_llm_request_metrics",
        value=_sum,
        labels={"request_type": "active"},
        meaning="`slipstream_requests_running` + `slipstream_requests_waiting`",
    ),
    _trt_requests("max", Metric.REQUESTS_MAX),
    _trt_blocks("used", Metric.KV_BLOCKS_USED),
    _trt_blocks("free", Metric.KV_BLOCKS_FREE),
    _trt_blocks("max", Metric.KV_BLOCKS_TOTAL),
    _trt_blocks("tokens_per", Metric.KV_BLOCK_TOKENS),
    _trt_blocks("fraction", Metric.KV_UTILIZATION),
    Alias(
        "nv_trt_llm_inflight_batcher_metrics",
        value=_difference,
        labels={"inflight_batcher_specific_metric": "generation_requests"},
        meaning="`slipstream_requests_running` - `slipstream_requests_prefilling`",
    ),
    Alias("nv_trt_llm_general_metrics", Metric.NUM_STEPS, labels={"general_type": "iteration_counter"}),
    Alias(
        "nv_trt_llm_general_metrics",
        value=lambda gauges: time.time(),
        labels={"general_type": "timestamp"},
        meaning="Unix time of the last update",
    ),
    Alias("nv_llm_input_token_len", Metric.REQUEST_PROMPT_TOKENS),
    Alias("nv_llm_output_token_len", Metric.REQUEST_GENERATION_TOKENS),
)
ALIASES: dict[str, tuple[Alias, ...]] = dict(zip(ALIAS_SETS, (_VLLM, _TENSORRT_LLM), strict=True))


def chosen_names(value: str) -> tuple[str, ...]:
    """The value of the parameter `metrics_aliases` as names of ALIASES."""
    return tuple(name.strip() for name in value.split(",") if name.strip() != NO_ALIASES)


class MetricAliases:
    """The aliases of one engine. specs: their declarations, in the order of their indices from len(METRICS) on."""

    def __init__(self, names: Iterable[str] = (), model_name: str = "") -> None:
        aliases = [alias for name in names for alias in ALIASES[name]]
        # vLLM's dashboards choose a model by this label
        extra = {"model_name": model_name}
        self.specs = tuple(
            replace(alias.spec, labels={**alias.spec.labels, **(extra if alias.family.startswith("vllm:") else {})})
            for alias in aliases
        )
        self._gauges: dict[int, float] = {}
        self._copies: dict[int, list[int]] = {}
        self._values: list[tuple[int, Callable[[_Gauges], float]]] = []
        for index, alias in enumerate(aliases, len(METRICS)):
            if alias.source is not None:
                self._copies.setdefault(int(alias.source), []).append(index)
            elif alias.value is not None:
                self._values.append((index, alias.value))

    def repeat(self, news: Sequence[tuple[int, list[float]]]) -> list[tuple[int, list[float]]]:
        """What the aliases say of these (metric index, values)."""
        repeated = [(index, values) for metric, values in news for index in self._copies.get(metric, ())]
        if self._values:
            gauges = [(metric, values[0]) for metric, values in news if METRICS[metric].kind is MetricKind.GAUGE]
            self._gauges.update(gauges)
            repeated += [(index, [value(self._gauges)]) for index, value in self._values]
        return repeated


def chosen_aliases(serving: ServingConfig) -> MetricAliases:
    return MetricAliases(chosen_names(serving.metrics_aliases), serving.model_name)
