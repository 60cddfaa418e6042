"""The gateway's counters over processes, and the Grafana dashboard's queries against the names that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from slipstream.core.stats import METRICS, MetricKind
from slipstream.server.metrics import FAMILIES, PREFIX, Metrics, make_file

ROOT = Path(__file__).resolve().parents[2]
_WORKER = """
import sys
from pathlib import Path
from slipstream.server.metrics import Metrics
metrics = Metrics(Path(sys.argv[1]))
metrics.count_request("chat", 200)
metrics.observe("first_byte_seconds", "chat", 0.03)
metrics.set("streams_in_flight", 5)
print("ready", flush=True)
sys.stdin.read()
"""


def start_worker(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WORKER, str(path)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    return worker


def stop(worker: subprocess.Popen[str]) -> None:
    worker.communicate("", timeout=10)


def test_a_row_per_worker_and_a_dead_ones_row_again(tmp_path: Path) -> None:
    path = make_file(tmp_path, 2)
    mine = Metrics(path)
    first = start_worker(path)
    assert 'requests_total{endpoint="chat",status="200"} 1' in mine.render()
    assert "streams_in_flight 5" in mine.render()
    stop(first)
    second = start_worker(path)  # the file has no third row
    mine.count_request("chat", 200)
    text = mine.render()
    assert 'requests_total{endpoint="chat",status="200"} 3' in text, "counters go on counting"
    assert "streams_in_flight 5" in text, "gauges do not add up over the dead"
    assert 'first_byte_seconds_bucket{endpoint="chat",le="0.05"} 2' in text
    assert 'first_byte_seconds_bucket{endpoint="chat",le="0.025"} 0' in text
    assert 'first_byte_seconds_count{endpoint="chat"} 2' in text
    stop(second)


def test_statuses_and_endpoints_that_nobody_thought_of() -> None:
    metrics = Metrics()
    metrics.count_request("other", 418)
    assert f'{PREFIX}requests_total{{endpoint="other",status="other"}} 1' in metrics.render()


# ---------------------------------------------------------------- the dashboard


def sample_names() -> set[str]:
    """Every name that a query may use."""
    names = set()
    histograms = {spec.family for spec in METRICS if spec.kind is MetricKind.HISTOGRAM}
    histograms |= {PREFIX + family.name for family in FAMILIES if family.kind == "histogram"}
    for family in {spec.family for spec in METRICS} | {PREFIX + family.name for family in FAMILIES}:
        names |= {f"{family}_{end}" for end in ("bucket", "sum", "count")} if family in histograms else {family}
    return names | set(re.findall(r'"(slipstream_\w+)"', (ROOT / "backend/triton/metrics.cc").read_text()))


def queries() -> list[str]:
    dashboard = json.loads((ROOT / "deploy/grafana/slipstream.json").read_text())
    found = [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    return found + [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    used = {name for query in queries() for name in re.findall(r"slipstream_\w+", query)}
    assert len(used) > 25
    assert used <= sample_names()


def test_the_dashboard_shows_every_metric() -> None:
    used = {name for query in queries() for name in re.findall(r"slipstream_\w+", query)}
    missing = {re.sub(r"_(bucket|sum|count)$", "", name) for name in sample_names() - used}
    assert missing - {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} == set()


def test_the_page_of_metrics_names_metrics_that_exist() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in sample_names()}
    assert set(re.findall(r"slipstream_\w+", text)) <= sample_names() | families


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/slipstream.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
