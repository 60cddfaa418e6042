"""Formats of one engine side by side: tokens/s by batch, ms to the first token by length, and ratios of formats.

    python tests/bench/compare.py --engines slipstream --formats none,fp8,wint4,w4a8_fp8 --out results -- \\
        --measure batch,prefill --batches 1,8,32,64,128 --output-len 128 --prefill-lens 1024,65536 --max-model-len 66560
    python tests/bench/format_table.py results/compare.json more/compare.json

compare.py prints it behind its own table where batches were measured; parts of several runs are put together by the
second command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from measures import Record

RATIOS = (
    ("fp8", "none"),
    ("wint4", "none"),
    ("w4a8_fp8", "wint4"),
    ("w4a8_fp8", "wint4-fp8kv"),
    ("w4a8_fp8", "fp8"),
    ("w8a8_int8", "fp8"),
)  # how many times faster the first is than the second
Cells = dict[tuple[str, int], Record]  # by format and the number that heads a column


def table(records: list[Record], engine: str = "slipstream") -> str:
    """Markdown; "" without records of batches."""
    own = [r for r in records if r["engine"] == engine and "skipped" not in r]
    batches = {(r["format"], r["batch"]): r for r in own if r["what"] == "batch"}
    prompts = {(r["format"], r["input_len"]): r for r in own if r["what"] == "prefill"}
    parts = []
    if batches:
        sizes = next(iter(batches.values()))
        title = f"tokens/s while decoding / in all, of {sizes['input_len']} in and {sizes['output_len']} out"
        parts.append(side_by_side(title, batches, _show_speeds, _speed_ratios))
    if parts and prompts:
        title = "ms to the first token of a prompt"
        parts.append(side_by_side(title, prompts, lambda r: f"{r['ttft_ms']:,.4g}", _ttft_ratio))
    return "\n\n".join(parts)


def side_by_side(
    title: str, cells: Cells, show: Callable[[Record], str], ratio: Callable[[Record, Record], str]
) -> str:
    """Markdown: a row a format, a column a number, then a row for each pair of RATIOS that is there."""
    names = list(dict.fromkeys(name for name, _ in cells))
    columns = sorted({column for _, column in cells})
    rows = [[title, *(f"{column:,}" for column in columns)], ["---", *["--:"] * len(columns)]]
    rows += [[name, *(show(cells[name, c]) if (name, c) in cells else "" for c in columns)] for name in names]
    for fast, slow in RATIOS:
        pairs = [(cells.get((fast, column)), cells.get((slow, column))) for column in columns]
        ratios = [ratio(*pair) if pair[0] and pair[1] else "" for pair in pairs]
        if any(ratios):
            rows.append([f"**{fast} / {slow}**", *ratios])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _show_speeds(record: Record) -> str:
    return f"{record['decode_tok_s']:,.0f} / {record['out_tok_s']:,.0f}"


def _speed_ratios(fast: Record, slow: Record) -> str:
    return " / ".join(f"{fast[speed] / slow[speed]:.2f}" for speed in ("decode_tok_s", "out_tok_s"))


def _ttft_ratio(fast: Record, slow: Record) -> str:
    return f"{slow['ttft_ms'] / fast['ttft_ms']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="compare.json of runs of one shape")
    parser.add_argument("--engine", default="slipstream")
    arguments = parser.parse_args()
    records = [record for path in arguments.files for record in json.loads(path.read_text())]
    print(table(records, arguments.engine) or "no batches were measured")


if __name__ == "__main__":
    main()
