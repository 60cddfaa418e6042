"""The text that drafters learn from: packed token ids, or JSON lines with a "text" or with "token_ids" each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT = 100  # one of so many texts


@dataclass(frozen=True)
class Text:
    """ids: [num_tokens]. starts: where texts begin, ascending; None: windows may begin anywhere."""

    ids: np.ndarray
    starts: np.ndarray | None = None

    @classmethod
    def of(cls, texts: list[list[int]]) -> Text:
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        ids = np.concatenate([np.asarray(text, dtype=np.uint32) for text in texts])
        return cls(ids, np.concatenate([[0], lengths.cumsum()[:-1]]))


def packed_text(folder: Path) -> tuple[Text, Text]:
    """Training and held-out text that build/train_demo_model.py packed."""
    from demo_model.pack import load_packed

    return Text(load_packed(folder, "train")[0]), Text(load_packed(folder, "held_out")[0])


def line_text(file: Path, model: Path) -> tuple[Text, Text]:
    """Training and held-out text of JSON lines; only those without token ids need the model's tokenizer.

    Raises ValueError for fewer lines than make a held-out text.
    """
    with file.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    if len(records) < 2:
        raise ValueError(f"texts: {file} has {len(records)} lines; at least 2 are needed, one of them held out")
    token_ids = _encoded(records, model)
    held_out = token_ids[::-HELD_OUT]
    training = [ids for place, ids in enumerate(reversed(token_ids)) if place % HELD_OUT]
    return Text.of(training), Text.of(held_out)


def _encoded(records: list[dict[str, Any]], model: Path) -> list[list[int]]:
    if all("token_ids" in record for record in records):
        return [record["token_ids"] for record in records]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [record.get("token_ids") or tokenizer(record["text"])["input_ids"] for record in records]
