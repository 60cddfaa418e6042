"""Decodes of all shapes, formats and contexts in one table: our ms per token, the rival's, and the ratio of both.

    python tests/bench/compare.py --shape llama3-8b,qwen2.5-7b --formats none,fp8,w4a8_fp8 --out results -- \\
        --measure decode --prefix-caching --contexts 1024,3000,8192 --batches 256,200,64,8,1 --max-model-len 8448
    python tests/bench/decode_grid.py results/compare.json more/compare.json

compare.py prints it where several shapes or contexts were measured; the second command joins several runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from measures import Record, time_ratio

OURS, RIVAL = "slipstream", "vllm"
LEAST: Mapping[str, float] = {"none": 1.05, "fp8": 1.2}  # times faster than the rival, by format
LEAST_OF_4_BITS = 1.35
Row = tuple[str, str, int]  # shape, format, context


def table(records: list[Record]) -> str:
    """Markdown with a row a shape, format and context, and below it the cells that miss; "" without decodes."""
    cells = {
        (record["engine"], (record["shape"], record["format"], record["context"]), record["batch"]): record
        for record in records
        if record["what"] == "decode" and "tpot_ms" in record and not record.get("adapters")
    }
    rows = list(dict.fromkeys(row for engine, row, _ in cells if engine == OURS))
    batches = sorted({batch for _, _, batch in cells})
    if not rows:
        return ""
    lines = [["shape", "format", "context", *(f"{batch:,}" for batch in batches)], ["---"] * 3 + ["--:"] * len(batches)]
    misses = []
    for row in rows:
        shown = []
        for batch in batches:
            ours, rival = cells.get((OURS, row, batch)), cells.get((RIVAL, row, batch))
            shown.append(_show(ours, rival) if ours else "")
            if ours and rival and time_ratio(rival, ours) < least(row[1]):
                misses.append(f"- {row[0]}, {row[1]}, {row[2]:,} tokens, {batch} requests: {_show(ours, rival)}")
        lines.append([row[0], row[1], f"{row[2]:,}", *shown])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([text, "Less than asked:\n\n" + "\n".join(misses)]) if misses else text


def least(name: str) -> float:
    """How many times faster than the rival a format is to be."""
    return LEAST.get(name, LEAST_OF_4_BITS if "4" in name else LEAST["fp8"])


def _show(ours: Record, rival: Record | None) -> str:
    """Milliseconds, the rival's, the ratio of times, and ours' share of the physical limit."""
    times = f"{ours['tpot_ms']:.2f}"
    if rival is not None:
        times += f" / {rival['tpot_ms']:.2f} **({time_ratio(rival, ours):.2f})**"
    return f"{times}, {ours['limit']:.0%}" if "limit" in ours else times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="compare.json of one or several runs")
    arguments = parser.parse_args()
    print(table([record for path in arguments.files for record in json.loads(path.read_text())]))


if __name__ == "__main__":
    main()
