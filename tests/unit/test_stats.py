"""core/stats.py: declarations that Prometheus accepts, and a hand-over between two threads that loses nothing."""

from __future__ import annotations

import re
import threading
import time

from fake_llm import make_llm, make_request
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.gauges import record_gauges
from slipstream.core.metric_aliases import MetricAliases
from slipstream.core.request import FinishReason
from slipstream.core.request_memory import RequestMemory
from slipstream.core.stats import (
    FINISHED_METRIC,
    METRICS,
    Metric,
    MetricKind,
    MetricSpec,
    Stats,
    accepted_metric,
    drafted_metric,
)


def drained(stats: Stats) -> dict[Metric, list[float]]:
    """Without drafts by position."""
    stats.publish()
    return {Metric(index): values for index, values in stats.drain() if index < len(Metric)}


def test_declarations_are_what_prometheus_accepts() -> None:
    assert [int(metric) for metric in Metric] == list(range(len(Metric)))
    assert accepted_metric(DRAFT_METHODS.names()[-1], 99) == len(METRICS) - 1
    for spec in METRICS:
        assert re.fullmatch(r"slipstream_[a-z_]+", spec.family) and spec.help
        assert (spec.kind is MetricKind.COUNTER) == spec.family.endswith("_total") or spec.kind is MetricKind.GAUGE
        assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM)
        assert list(spec.buckets) == sorted(set(spec.buckets))
    rows = [(spec.family, tuple(spec.labels.items())) for spec in METRICS]
    assert len(set(rows)) == len(rows), "two metrics have one name and labels"
    assert {spec.help for spec in METRICS if spec.family == "slipstream_requests_finished_total"} == {
        METRICS[Metric.FINISHED_STOP].help
    }


def test_every_finish_reason_has_its_counter() -> None:
    for reason in FinishReason:
        assert METRICS[FINISHED_METRIC[reason]].labels == {"reason": reason.value}


def test_counters_add_gauges_replace_histograms_collect() -> None:
    stats = Stats()
    stats.add(Metric.PREEMPTIONS, 2)
    stats.add(Metric.PREEMPTIONS)
    stats.set(Metric.REQUESTS_RUNNING, 5)
    stats.set(Metric.REQUESTS_RUNNING, 4)
    stats.observe(Metric.STEP_TIME, 0.25)
    stats.observe(Metric.STEP_TIME, 0.5)
    news = drained(stats)
    assert news.pop(Metric.LAST_STEP_AGE) == [0.0]
    expected = {Metric.PREEMPTIONS: [3.0], Metric.REQUESTS_RUNNING: [4.0], Metric.STEP_TIME: [0.25, 0.5]}
    assert news == expected
    assert set(drained(stats)) == {Metric.LAST_STEP_AGE}


def test_values_wait_until_the_last_ones_are_fetched() -> None:
    stats = Stats()
    for _ in range(3):
        stats.add(Metric.CANCELLATIONS)
        stats.publish()
    assert dict(stats.drain())[Metric.CANCELLATIONS] == [1.0]
    assert drained(stats)[Metric.CANCELLATIONS] == [2.0]


def test_drafts_by_position_are_told_of_loaded_methods_alone() -> None:
    stats = Stats(methods=("medusa",))
    told = {(spec.labels["method"], spec.labels["position"]) for spec in stats.specs if "method" in spec.labels}
    assert told == {("medusa", position) for position in ("1", "2", "3", "4", "5", "6", "7", "8+")}
    stats.add(drafted_metric("medusa", 3), 2)
    stats.add(accepted_metric("medusa", 9), 5)
    stats.add(Metric.PREEMPTIONS)
    stats.publish()
    news = {(spec.family, spec.labels.get("position")): values for spec, values in told_of(stats)}
    assert news["slipstream_spec_position_drafted_total", "3"] == [2.0]
    assert news["slipstream_spec_position_accepted_total", "8+"] == [5.0]
    assert news["slipstream_preemptions_total", None] == [1.0]
    assert len(Stats(methods=()).specs) == len(Metric)


def test_aliases_come_behind_the_drafts_of_loaded_methods() -> None:
    stats = Stats(MetricAliases(("vllm",)), ("ngram",))
    stats.add(Metric.GENERATION_TOKENS, 7)
    stats.publish()
    found = {spec.family: values for spec, values in told_of(stats)}
    assert found["vllm:generation_tokens_total"] == found["slipstream_generation_tokens_total"] == [7.0]


def told_of(stats: Stats) -> list[tuple[MetricSpec, list[float]]]:
    """What is drained, beside the specs that READY names at these indices."""
    return [(stats.specs[index], values) for index, values in stats.drain()]


def test_last_step_age_grows_only_while_there_is_work() -> None:
    stats = Stats()
    stats.last_step_time = time.monotonic() - 3.0
    assert 3.0 <= dict(stats.drain())[Metric.LAST_STEP_AGE][0] < 60.0
    stats.last_step_time = 0.0
    assert dict(stats.drain())[Metric.LAST_STEP_AGE] == [0.0]


def test_two_threads_lose_nothing() -> None:
    stats, num_steps = Stats(), 20_000
    done = threading.Event()
    count = 0.0
    observed: list[float] = []

    def fetch() -> None:
        nonlocal count
        for index, values in stats.drain():
            if index == Metric.GENERATION_TOKENS:
                count += values[0]
            elif index == Metric.ITL:
                observed.extend(values)

    def output_thread() -> None:
        while not done.is_set():
            fetch()
            time.sleep(0)  # let the other thread in, or each hand-over waits for the interpreter's switch interval

    thread = threading.Thread(target=output_thread)
    thread.start()
    for step in range(num_steps):
        stats.add(Metric.GENERATION_TOKENS)
        stats.observations(Metric.ITL).append(step)
        stats.publish()
    done.set()
    thread.join()
    fetch()
    stats.publish()
    fetch()
    assert count == num_steps
    assert observed == list(range(num_steps)), "lost, doubled or out of order"


def test_a_request_leaves_its_latencies_and_counts() -> None:
    llm = make_llm(num_blocks=16)
    first, second = make_request(list(range(9)), 4), make_request([*range(8), 50], 3)
    for request in (first, second):
        request.times.arrival_ns = time.time_ns() - 2_000_000_000
        llm.scheduler.add(request)
    llm.run()
    record_gauges(llm.scheduler, RequestMemory(1 << 20))
    news = drained(llm.scheduler.stats)
    assert (news[Metric.PROMPT_TOKENS], news[Metric.GENERATION_TOKENS]) == ([18.0], [7.0])
    assert (news[Metric.PREFIX_QUERIES], news[Metric.PREFIX_HITS]) == ([18.0], [8.0])
    assert len(news[Metric.ITL]) == 3 + 2 and all(value >= 0 for value in news[Metric.ITL])
    for metric in (Metric.TTFT, Metric.QUEUE_TIME, Metric.E2E_TIME):
        assert len(news[metric]) == 2 and all(2.0 <= value < 60.0 for value in news[metric])
    assert news[Metric.FINISHED_LENGTH] == [2.0]
    assert (news[Metric.KV_BLOCKS_TOTAL], news[Metric.KV_BLOCKS_FREE]) == ([16.0], [16.0])
    assert news[Metric.KV_BLOCKS_LEAKED] == news[Metric.KV_BLOCKS_USED] == news[Metric.REQUESTS_RUNNING] == [0.0]
    assert sorted(news[Metric.REQUEST_PROMPT_TOKENS]) == [9.0, 9.0] and news[Metric.REQUEST_SEQUENCES] == [1.0, 1.0]
    assert sorted(news[Metric.REQUEST_GENERATION_TOKENS]) == [3.0, 4.0]
    assert all(value >= 0 for value in (*news[Metric.PREFILL_TIME], *news[Metric.DECODE_TIME]))
    times = first.times
    assert times.arrival_ns < times.first_scheduled_ns <= times.first_token_ns <= times.last_token_ns


def test_gauges_show_running_waiting_and_leaks() -> None:
    llm = make_llm(max_num_seqs=1)
    for length in (9, 10, 11):
        llm.scheduler.add(make_request(length))
    llm.step()
    llm.scheduler.cache.pool.allocate(2)  # by nobody
    memory, large = RequestMemory(1 << 20), make_request(5)
    large.num_bytes = 70_000
    memory.take(large)
    record_gauges(llm.scheduler, memory)
    news = drained(llm.scheduler.stats)
    assert (news[Metric.REQUESTS_RUNNING], news[Metric.REQUESTS_WAITING]) == ([1.0], [2.0])
    assert (news[Metric.KV_BLOCKS_USED], news[Metric.KV_BLOCKS_LEAKED]) == ([5.0], [2.0])
    assert news[Metric.REQUEST_BYTES] == [70_000.0]
    assert news[Metric.KV_UTILIZATION] == [5 / llm.scheduler.cache.num_blocks]


def test_a_cancel_counts_twice_once_as_such_and_once_as_an_end() -> None:
    llm = make_llm()
    llm.scheduler.add(request := make_request(5))
    llm.step()
    llm.scheduler.finish(request, FinishReason.CANCELLED)
    news = drained(llm.scheduler.stats)
    assert news[Metric.CANCELLATIONS] == news[Metric.FINISHED_CANCELLED] == [1.0]


def test_drafts_are_counted() -> None:
    llm = make_llm()
    llm.num_drafts, llm.num_right = 3, 2
    llm.scheduler.add(request := make_request(5, 10))
    llm.run()
    news = drained(llm.scheduler.stats)
    assert news[Metric.DRAFTED_TOKENS] == [request.num_drafted_tokens] and news[Metric.ACCEPTED_TOKENS] == [6.0]
    assert len(news[Metric.ITL]) == 9


def test_refusals_of_any_thread_are_counted_by_reason() -> None:
    stats = Stats()
    for fault in (RequestError, RequestError, CapacityError, ValueError):
        stats.count_refusal(fault)
    stats.publish()
    told = dict(stats.drain())
    assert [told[metric] for metric in (Metric.REFUSED_INVALID, Metric.REFUSED_CAPACITY, Metric.REFUSED_INTERNAL)] == [
        [2.0], [1.0], [1.0]
    ]  # fmt: skip
    stats.publish()
    assert Metric.REFUSED_INVALID not in dict(stats.drain()), "once"
