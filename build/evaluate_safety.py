"""Measure a safety model of model_repository on labelled texts: precision, recall and what is flagged wrongly.

    .venv/bin/python build/evaluate_safety.py --model injection --unsafe jailbreaks.json --safe instructions.json
    .venv/bin/python build/evaluate_safety.py --model safety,injection --unsafe a.txt --safe b.txt --sample 300

Files: .txt (a text a line), .jsonl or .json (texts, or objects with one of the keys prompt, instruction and text).
Several models: a text is flagged if one of them flags it, as in `guarded` with `prompt_checks`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.encoders.parameters import Parameters
from slipstream.encoders.safety import SafetyJudge, open_safety

ROOT = Path(__file__).resolve().parent.parent
PARAMETER = re.compile(r'parameters \{ key: "(\w+)" value \{ string_value: "([^"]*)" \} \}')
KEYS = ("prompt", "instruction", "text")
ROWS = 16  # texts of one run


def read_texts(path: Path) -> list[str]:
    """Without repetitions, in the file's order."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        entries = json.loads(content)
    else:
        lines = [line for line in content.splitlines() if line.strip()]
        entries = lines if path.suffix == ".txt" else [json.loads(line) for line in lines]
    return list(dict.fromkeys(text_of(entry) for entry in entries))


def text_of(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    found = [entry[key] for key in KEYS if isinstance(entry, dict) and isinstance(entry.get(key), str)]
    if not found:
        raise SystemExit(f"an entry without a text, accepted: a text or an object with {', '.join(KEYS)}")
    return found[0]


def open_judges(names: str) -> list[SafetyJudge]:
    folders = [ROOT / "model_repository" / name for name in names.split(",")]
    texts = [(folder / "config.pbtxt").read_text(encoding="utf-8") for folder in folders]
    return [open_safety(Parameters(dict(PARAMETER.findall(text))), folder) for text, folder in zip(texts, folders)]


def num_flagged(judges: Sequence[SafetyJudge], texts: Sequence[str]) -> int:
    count = 0
    for start in range(0, len(texts), ROWS):
        part = list(texts[start : start + ROWS])
        verdicts = [judge.judge(part) for judge in judges]
        count += sum(any(one.is_flagged for one in each) for each in zip(*verdicts))
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="safety", help="of model_repository; several by commas (%(default)s)")
    parser.add_argument("--unsafe", type=Path, required=True, help="a file of texts that should be flagged")
    parser.add_argument("--safe", type=Path, required=True, help="a file of texts that should not be")
    parser.add_argument("--sample", type=int, default=0, help="so many texts of each file, drawn with seed 0; 0: all")
    options = parser.parse_args(arguments)
    unsafe, safe = read_texts(options.unsafe), read_texts(options.safe)
    if options.sample:
        unsafe, safe = (random.Random(0).sample(texts, min(options.sample, len(texts))) for texts in (unsafe, safe))
    judges, started = open_judges(options.model), time.perf_counter()
    hits, false_alarms = num_flagged(judges, unsafe), num_flagged(judges, safe)
    seconds = time.perf_counter() - started
    precision, recall = hits / max(1, hits + false_alarms), hits / max(1, len(unsafe))
    print(f"{options.model}: {hits} of {len(unsafe)} unsafe and {false_alarms} of {len(safe)} safe texts are flagged")
    print(f"precision {precision:.3f}, recall {recall:.3f}, {len(unsafe) + len(safe)} texts in {seconds:.0f} s")


if __name__ == "__main__":
    main()
