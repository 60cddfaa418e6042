"""A packed text as build/train_demo_model.py writes it, of invented ids."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path

import torch


def make_packed_text(folder: Path, vocab_size: int = 96, num_tokens: int = 2048) -> Path:
    index = {}
    for seed, split in enumerate(("train", "held_out")):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab_size, (num_tokens,), generator=generator).short().numpy().tobytes()
        (folder / f"{split}.xz").write_bytes(lzma.compress(ids))
        index[split] = {"shards": [f"{split}.xz"], "num_bytes": 1, "sha256": hashlib.sha256(ids).hexdigest()}
    (folder / "index.json").write_text(json.dumps(index))
    return folder
