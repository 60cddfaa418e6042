"""All engines side by side: a row a measurement, with ratios to ours and the share of the limit; and a plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measures import RATIO_KEYS, Record, are_alike, figure_of, time_ratio

OURS, SERVED, RIVAL = "slipstream", "slipstream+triton", "vllm"
FIGURES = {
    "decode": ("tpot_ms", "ms/token"),
    "prefill": ("ttft_ms", "ms"),
    "throughput": ("out_tok_s", "tokens/s"),
    "batch": ("out_tok_s", "tokens/s"),
}


def rows(records: list[Record]) -> Iterator[list[str]]:
    """Table rows: shape and format, measurement, then a cell per engine, the share of the limit, ratios to ours."""
    for ours in records:
        if ours["engine"] != OURS or ours["what"] not in FIGURES or "skipped" in ours:
            continue
        figure, unit = FIGURES[ours["what"]]
        context = f" at {ours['context']}" if "context" in ours else ""
        label = {
            "decode": f"decode, batch {ours.get('batch')}{context}",
            "prefill": f"prefill, {ours.get('input_len')} tokens",
        }
        count = f"{ours.get('num_prompts') or ours.get('batch')} x {ours.get('input_len')}/{ours.get('output_len')}"
        cells = [name_of(ours), label.get(ours["what"], count), unit, f"{ours[figure]:g}"]
        cells.append(f"{ours['limit']:.0%}" if "limit" in ours else "")
        for engine in (SERVED, RIVAL):
            other = next((r for r in records if r["engine"] == engine and _is_same(r, ours)), None)
            cells += [f"{other[figure]:g}", f"{time_ratio(other, ours):.2f}"] if other else ["", ""]
        yield cells


def name_of(record: Record) -> str:
    return f"{record['shape']}, {record['format']}" if "shape" in record else str(record["format"])


def _is_same(one: Record, other: Record) -> bool:
    return figure_of(one) is not None and are_alike(one, other, ("shape", "format", *RATIO_KEYS))


def table(records: list[Record]) -> str:
    head = ["shape, format", "measurement", "unit", OURS, "limit", SERVED, "its time / ours", RIVAL, "its time / ours"]
    lines = [head, ["---"] * len(head), *rows(records)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join(filter(None, [text, notes(records)]))


def notes(records: list[Record]) -> str:
    """What failed, and what perf_analyzer said, as a list."""
    found = [f"- {r['engine']}, {name_of(r)}: {r['reason']}" for r in records if r["what"] == "failed"]
    for r in records:
        if r["what"] == "perf_analyzer":
            found.append(
                f"- perf_analyzer, {r['format']}, {r['concurrency']} streams of {r['input_len']}/{r['output_len']}: "
                f"{r['out_tok_s']:g} tokens/s"
            )
    return "\n".join(found)


def plot(records: list[Record], path: Path) -> str:
    """Tokens/s over batch and TTFT over prompt length. Returns why there is none, or ""."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (("decode", "batch", "out_tok_s", "tokens/s"), ("prefill", "input_len", "ttft_ms", "TTFT, ms"))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for axis, (what, x, y, label) in zip(axes, panels):
        lines: dict[str, list[tuple[Any, Any]]] = {}
        for record in records:
            if record["what"] == what and y in record:
                lines.setdefault(f"{record['engine']}, {name_of(record)}", []).append((record[x], record[y]))
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points)), marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel=x.replace("_", " "), ylabel=label)
        if lines:
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return ""
