"""The gateway's metrics in Prometheus' format, summed over its worker processes.

Every worker writes its own row of doubles in one mapped file; the worker that is scraped sums the rows. A restarted
worker takes over the row of a dead one, so that counters stay monotonic. Event loop thread.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

ENDPOINTS = ("chat", "completions", "embeddings", "responses", "messages", "rerank", "tokenize", "models", "other")
REASONS = (  # the limit of docs/security.md or of a key, by its name, that a request or a connection has met
    "max_connections",
    "max_url_bytes",
    "max_headers",
    "max_header_bytes",
    "max_total_header_bytes",
    "max_pipelined_requests",
    "header_timeout_s",
    "body_timeout_s",
    "send_timeout_s",
    "max_body_bytes",
    "max_total_body_bytes",
    "max_total_answer_bytes",
    "max_concurrent_requests",
    "reader",  # the queue of bodies that it reads is full
    "max_priority",
    "max_num_seqs",
    "requests_per_minute",
    "tokens_per_minute",
    "malformed",  # no HTTP, or a transfer coding other than chunked
    "allowed_host",
    "api_key",  # none, or a wrong one
    "model",  # it is away or full: what Triton said, or that Triton is not there
)
STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 421, 429, 499, 500, 503, 504)
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PREFIX = "slipstream_gateway_"


@dataclass(frozen=True)
class Family:
    """labels: one sample each, like 'endpoint="chat"'; "" for a sample without labels."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ("",)

    @property
    def width(self) -> int:
        """Doubles per label: a histogram has its buckets, +Inf and the sum."""
        return len(_BUCKETS) + 2 if self.kind == "histogram" else 1


_BY_ENDPOINT = tuple(f'endpoint="{endpoint}"' for endpoint in ENDPOINTS)
FAMILIES = (
    Family(
        "requests_total",
        "counter",
        "Requests answered, by status (499: the client went away first)",
        tuple(f'endpoint="{e}",status="{s}"' for e in ENDPOINTS for s in (*STATUSES, "other")),
    ),
    Family(
        "refused_total",
        "counter",
        "Requests and connections turned away, by the limit that they met; key is empty where none was shown",
        tuple(f'reason="{reason}",key=""' for reason in REASONS),
    ),
    Family("requests_in_flight", "gauge", "Requests being answered"),
    Family("streams_in_flight", "gauge", "Streamed answers among them"),
    Family("stream_events_total", "counter", "Server-sent events with text"),
    Family("stream_tokens_total", "counter", "Tokens of streamed answers, an upper bound where events hold several"),
    Family("disconnects_total", "counter", "Clients that went away before their answer ended"),
    Family("spans_exported_total", "counter", "Spans that the collector of traces has taken"),
    Family("spans_dropped_total", "counter", "Spans lost because the collector of traces was away or too slow"),
    Family("loop_lag_seconds", "gauge", "How late the event loop is, at most of all workers; above 0.05 add workers"),
    Family("first_byte_seconds", "histogram", "Seconds from a request to the first byte of its answer", _BY_ENDPOINT),
    Family("request_duration_seconds", "histogram", "Seconds from a request to the end of its answer", _BY_ENDPOINT),
)


def families_of(keys: Sequence[str]) -> tuple[Family, ...]:
    """FAMILIES, with labels for the names of the API keys."""
    shown = [name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name in ("", *_unique(keys))]
    refusals = tuple(f'reason="{reason}",key="{name}"' for name in shown for reason in REASONS)
    return tuple(replace(family, labels=refusals) if family.name == "refused_total" else family for family in FAMILIES)


def _unique(keys: Sequence[str]) -> list[str]:
    """Distinct names: keys with the same name are counted together."""
    return [name for name in dict.fromkeys(keys) if name]


def _layout(families: Sequence[Family]) -> dict[str, int]:
    """Offset of each family in a row, and its end; 0 is the worker's process id."""
    offsets, at = {}, 1
    for family in families:
        offsets[family.name] = at
        at += family.width * len(family.labels)
    offsets["end"] = at
    return offsets


def make_file(folder: Path, num_workers: int, keys: Sequence[str] = ()) -> Path:
    path = folder / "metrics"
    path.write_bytes(bytes(8 * _layout(families_of(keys))["end"] * num_workers))
    return path


class Metrics:
    """path: as make_file made it with the same keys, or None for a process on its own. keys: names of the API keys."""

    def __init__(self, path: Path | None = None, keys: Sequence[str] = ()) -> None:
        self._families = families_of(keys)
        self._offsets = _layout(self._families)
        self._row_size = self._offsets["end"]
        self._place_of_key = {name: place for place, name in enumerate(("", *_unique(keys)))}
        self._all: memoryview[float]
        self._row: memoryview[float]
        if path is None:
            self._all = memoryview(bytearray(8 * self._row_size)).cast("d")
            self._row = self._all
            return
        with path.open("r+b") as file:
            self._all = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
            fcntl.flock(file, fcntl.LOCK_EX)
            self._row = self._take_row()
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would not: the map keeps a duplicate of the descriptor

    def _take_row(self) -> memoryview[float]:
        for start in range(0, len(self._all), self._row_size):
            row = self._all[start : start + self._row_size]
            if not is_alive(int(row[0])):
                row[0] = os.getpid()
                for family in self._families:
                    if family.kind == "gauge":
                        row[self._offsets[family.name]] = 0.0
                return row
        raise RuntimeError("more workers than rows of metrics")

    def add(self, name: str, value: float = 1.0) -> None:
        self._row[self._offsets[name]] += value

    def set(self, name: str, value: float) -> None:
        self._row[self._offsets[name]] = value

    def total(self, name: str) -> float:
        """Sum over all workers of a family without labels."""
        return sum(self._all[self._offsets[name] :: self._row_size].tolist())

    def count_request(self, endpoint: str, status: int) -> None:
        column = STATUSES.index(status) if status in STATUSES else len(STATUSES)
        self._row[self._offsets["requests_total"] + ENDPOINTS.index(endpoint) * (len(STATUSES) + 1) + column] += 1

    def count_refusal(self, reason: str, key: str = "") -> None:
        """key: the name of the API key that was shown."""
        column = self._place_of_key[key] * len(REASONS) + REASONS.index(reason)
        self._row[self._offsets["refused_total"] + column] += 1

    def observe(self, name: str, endpoint: str, seconds: float) -> None:
        at = self._offsets[name] + ENDPOINTS.index(endpoint) * (len(_BUCKETS) + 2)
        self._row[at + bisect.bisect_left(_BUCKETS, seconds)] += 1
        self._row[at + len(_BUCKETS) + 1] += seconds

    def render(self) -> str:
        """Prometheus text. Samples that are still zero and have labels are left out."""
        lines: list[str] = []
        for family in self._families:
            lines += [f"# HELP {PREFIX}{family.name} {family.help}", f"# TYPE {PREFIX}{family.name} {family.kind}"]
            for index, labels in enumerate(family.labels):
                at = self._offsets[family.name] + index * family.width
                values = [self._total(family, at + column) for column in range(family.width)]
                if labels and not any(values):
                    continue
                lines += _samples(PREFIX + family.name, family, labels, values)
        return "\n".join(lines) + "\n"

    def _total(self, family: Family, at: int) -> float:
        values = self._all[at :: self._row_size].tolist()
        return max(values) if family.name == "loop_lag_seconds" else sum(values)


def _samples(name: str, family: Family, labels: str, values: list[float]) -> list[str]:
    if family.kind != "histogram":
        return [f"{name}{f'{{{labels}}}' if labels else ''} {values[0]:.10g}"]
    lines, total = [], 0.0
    for bound, count in zip([*_BUCKETS, "+Inf"], values):
        total += count
        lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total:.10g}')
    return [*lines, f"{name}_sum{{{labels}}} {values[-1]:.10g}", f"{name}_count{{{labels}}} {total:.10g}"]


def is_alive(process: int) -> bool:
    if process == 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def fetch(url: str) -> str:
    """Triton's metrics, or a comment that says why not. Not on the event loop's thread: it may take 5 s."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.read().decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        return f"# Triton's metrics at {url} cannot be read: {error}\n"
