"""core/metric_aliases.py: what dashboards and autoscalers of other backends read is there, and says the same."""

from __future__ import annotations

import re

import pytest
from slipstream.core.config_parse import config_from_values
from slipstream.core.errors import ConfigError
from slipstream.core.metric_aliases import ALIASES, MetricAliases, chosen_names
from slipstream.core.stats import METRICS, Metric, MetricKind, Stats

VLLM_BACKEND = {  # of Triton's vLLM backend
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_n",
}
ENDPOINT_PICKER = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
AUTOSCALERS = {"vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc"}
TENSORRT_LLM = {"request_metrics", "kv_cache_block_metrics", "inflight_batcher_metrics", "general_metrics"}


def drained(stats: Stats) -> dict[tuple[str, tuple[str, ...]], list[float]]:
    """By family and the values of its labels."""
    stats.publish()
    specs = stats.specs
    return {(specs[index].family, tuple(specs[index].labels.values())): values for index, values in stats.drain()}


def test_the_families_that_others_read_are_there() -> None:
    families = {spec.family for spec in MetricAliases(ALIASES).specs}
    assert families >= VLLM_BACKEND | ENDPOINT_PICKER | AUTOSCALERS
    assert families >= {f"nv_trt_llm_{name}" for name in TENSORRT_LLM}


def test_declarations_are_what_prometheus_accepts() -> None:
    specs = Stats(MetricAliases(ALIASES, "llm")).specs
    assert specs[: len(METRICS)] == METRICS
    rows = [(spec.family, tuple(spec.labels.items())) for spec in specs]
    assert len(set(rows)) == len(rows)
    for family in {spec.family for spec in specs}:
        of_family = [spec for spec in specs if spec.family == family]
        assert len({spec.kind for spec in of_family}) == len({tuple(spec.labels) for spec in of_family}) == 1, family
        assert re.fullmatch(r"[a-z_:0-9]+", family)
    assert all(spec.labels["model_name"] == "llm" for spec in specs if spec.family.startswith("vllm:"))


def test_aliases_say_what_the_metrics_say() -> None:
    stats = Stats(MetricAliases(ALIASES, "llm"))
    stats.add(Metric.GENERATION_TOKENS, 7)
    stats.set(Metric.KV_UTILIZATION, 0.25)
    stats.set(Metric.REQUESTS_RUNNING, 5)
    stats.set(Metric.REQUESTS_WAITING, 3)
    stats.set(Metric.REQUESTS_PREFILLING, 2)
    stats.observe(Metric.ITL, 0.5)
    stats.observe(Metric.ITL, 0.75)
    news = drained(stats)
    assert news["vllm:generation_tokens_total", ("llm",)] == [7.0]
    assert news["vllm:kv_cache_usage_perc", ("llm",)] == news["vllm:gpu_cache_usage_perc", ("llm",)] == [0.25]
    assert news["vllm:time_per_output_token_seconds", ("llm",)] == [0.5, 0.75]
    assert news["nv_trt_llm_request_metrics", ("active",)] == [8.0]
    assert news["nv_trt_llm_inflight_batcher_metrics", ("generation_requests",)] == [3.0]
    assert drained(stats)["nv_trt_llm_request_metrics", ("active",)] == [8.0], "gauges stay until they are set again"


def test_every_metric_of_an_alias_has_its_kind() -> None:
    for spec in MetricAliases(ALIASES).specs:
        assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM)
        assert (spec.kind is MetricKind.COUNTER) == spec.family.endswith("_total")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("vllm,tensorrt_llm", ("vllm", "tensorrt_llm")),
        ("vllm", ("vllm",)),
        ("none", ()),
        (" tensorrt_llm ", ("tensorrt_llm",)),
    ],
)
def test_the_parameter_chooses_the_sets(value: str, names: tuple[str, ...]) -> None:
    config = config_from_values({"metrics_aliases": value}, is_complete=False)
    assert chosen_names(config.serving.metrics_aliases) == names
    assert len(Stats(MetricAliases(chosen_names("none"))).specs) == len(METRICS)


@pytest.mark.parametrize("value", ["sglang", "vllm,vllm", "vllm,none", "vllm;tensorrt_llm"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="metrics_aliases"):
        config_from_values({"metrics_aliases": value}, is_complete=False)
