"""Decodes of all shapes, formats and contexts in one table: our ms per token, the rival's, and the ratio of both.

    python tests/bench/compare.py --grid --gpus 0,1 --out results
    python tests/bench/decode_grid.py results/compare.json more/compare.json

compare.py prints it where several shapes or contexts were measured; the second command joins several runs. Below it are
the cells that miss their aim, with what the profiles of their steps say, and why other cells are empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import kernel_groups
from measures import Record, time_ratio

OURS, RIVAL = "slipstream", "vllm"
LEAST: Mapping[str, float] = {"none": 1.05, "fp8": 1.2}  # times faster than the rival, by format
LEAST_OF_4_BITS = 1.35
# with the same weights and cache: the rival's time is the least of what it took with one of these
FOUR_BITS = ("w4a8_fp8", "wint4-fp8kv")
MARK = "\N{DAGGER}"
NOTE = (
    f"{MARK} vLLM's faster 4-bit format there is that of the other row: `{FOUR_BITS[0]}`, or `{FOUR_BITS[1]}` (Marlin)."
)


class Row(NamedTuple):
    shape: str
    format: str
    context: int


Cells = dict[tuple[str, Row, int], Record]  # by engine, row and batch


def table(records: list[Record]) -> str:
    """Markdown with a row a shape, format and context, and the lists below it; "" without decodes."""
    asked = _cells(records, "decode")
    cells = {key: record for key, record in asked.items() if "tpot_ms" in record}
    rows = list(dict.fromkeys(row for _, row, _ in asked))
    batches = sorted({batch for _, _, batch in asked})
    if not cells:
        return ""
    lines = [["shape", "format", "context", *(f"{batch:,}" for batch in batches)], ["---"] * 3 + ["--:"] * len(batches)]
    lines += [
        [row.shape, row.format, f"{row.context:,}", *(_show(cells, row, batch) for batch in batches)] for row in rows
    ]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    misses = list(_misses(cells, _cells(records, "profile"), rows, batches))
    empty = list(_empty(asked, records, batches))
    return "\n\n".join(
        [
            text,
            *([NOTE] if MARK in text else []),
            *(["Less than asked:\n\n" + "\n".join(misses)] if misses else []),
            *(["Not measured:\n\n" + "\n".join(empty)] if empty else []),
        ]
    )


def _cells(records: list[Record], what: str) -> Cells:
    """Without adapters. Of the same cell in several runs, the last."""
    return {
        (record["engine"], Row(record["shape"], record["format"], record["context"]), record["batch"]): record
        for record in records
        if record["what"] == what and not record.get("adapters")
    }


def least(name: str) -> float:
    """How many times faster than the rival a format is to be."""
    return LEAST.get(name, LEAST_OF_4_BITS if "4" in name else LEAST["fp8"])


def rival_formats(name: str) -> tuple[str, ...]:
    """Formats in which the rival may be compared with this one of ours: the fastest counts."""
    return FOUR_BITS if name in FOUR_BITS else (name,)


def _rival(cells: Cells, row: Row, batch: int) -> Record | None:
    keys = [(RIVAL, row._replace(format=name), batch) for name in rival_formats(row.format)]
    return min((cells[key] for key in keys if key in cells), key=lambda record: float(record["tpot_ms"]), default=None)


def _show(cells: Cells, row: Row, batch: int) -> str:
    """Milliseconds, the rival's, the ratio of times, and ours' share of the physical limit."""
    ours, rival = cells.get((OURS, row, batch)), _rival(cells, row, batch)
    mark = MARK if rival and rival["format"] != row.format else ""
    if ours is None:
        return f"- / {rival['tpot_ms']:.2f}{mark}" if rival and not mark else ""
    times = f"{ours['tpot_ms']:.2f}"
    if rival is not None:
        times += f" / {rival['tpot_ms']:.2f}{mark} **({time_ratio(rival, ours):.2f})**"
    return f"{times}, {ours['limit']:.0%}" if "limit" in ours else times


def _misses(cells: Cells, profiles: Cells, rows: list[Row], batches: list[int]) -> Iterator[str]:
    for row, batch in itertools.product(rows, batches):
        ours, rival = cells.get((OURS, row, batch)), _rival(cells, row, batch)
        if ours and rival and time_ratio(rival, ours) < least(row.format):
            line = f"- {row.shape}, {row.format}, {row.context:,} tokens, {batch} requests: {_show(cells, row, batch)}"
            profile = profiles.get((OURS, row, batch))
            yield f"{line}; {kernel_groups.summary(profile)}" if profile else line


def _empty(asked: Cells, records: list[Record], batches: list[int]) -> Iterator[str]:
    """A line for each reason of a shape and format, with the engines and the cells that have it."""
    failed = {
        (record["engine"], (record["shape"], record["format"])): str(record["reason"])
        for record in records
        if record["what"] == "failed" and "shape" in record
    }
    rows: dict[tuple[str, str], list[Row]] = {pair: [] for _, pair in failed}
    for row in dict.fromkeys(row for _, row, _ in asked):
        rows.setdefault(row[:2], []).append(row)
    ran = {engine for engine, *_ in (*asked, *failed)}
    lines: dict[tuple[str, str, str], list[str]] = {}
    for pair, engine in itertools.product(rows, (OURS, RIVAL)):
        if engine in ran:
            for reason, cells in _gaps(asked, engine, rows[pair], batches, failed.get((engine, pair))).items():
                lines.setdefault((", ".join(pair), cells, reason), []).append(engine)
    for (name, cells, reason), engines in lines.items():
        yield f"- {name}, {' and '.join(engines)}: {cells}: {reason}"


def _gaps(asked: Cells, engine: str, rows: list[Row], batches: list[int], failure: str | None) -> dict[str, str]:
    """The cells of an engine's shape and format that are empty, by the reason. failure: of the engine, if it failed."""
    if failure and not any((engine, row, batch) in asked for row, batch in itertools.product(rows, batches)):
        return {failure: "all"}
    found: dict[str, dict[int, list[int]]] = {}
    for row, batch in itertools.product(rows, batches):
        record = asked.get((engine, row, batch), {"skipped": failure or "not in this run"})
        if "skipped" in record:
            found.setdefault(record["skipped"], {}).setdefault(row.context, []).append(batch)
    return {
        reason: "; ".join(f"{context:,} x {', '.join(map(str, some))}" for context, some in by_context.items())
        for reason, by_context in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="compare.json of one or several runs")
    arguments = parser.parse_args()
    print(table([record for path in arguments.files for record in json.loads(path.read_text())]))


if __name__ == "__main__":
    main()
