"""Turn the corpus into token ids: one uint16 array per split, each file preceded by <|endoftext|>, xz-compressed.

Runs where the corpus is; what it writes (<data>/packed) is all that training needs, small enough to be carried
to a GPU machine. xz with two-byte alignment brings Python's token ids to about 0.45 bytes each.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from demo_model.tokenizer import END_OF_TEXT_ID, corpus_texts

SPLITS = ("train", "held_out")
BATCH_FILES = 256
SHARD_TOKENS = 8_000_000  # the unit of parallel (de)compression
COMPRESS_THREADS = 2
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 2, "lp": 1, "pb": 1}]


def batches(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(texts, size)):
        yield batch


def encode_corpus(tokenizer: Tokenizer, path: Path, every: int = 1) -> tuple[np.ndarray, int]:
    """Token ids (uint16) of every `every`-th text of a JSON-lines corpus, and their UTF-8 bytes without separators."""
    chunks: list[np.ndarray] = []
    num_bytes = 0
    with tqdm(desc=f"encode {path.stem}", unit="B", unit_scale=True) as bar:
        for batch in batches(islice(corpus_texts(path), 0, None, every), BATCH_FILES):
            for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False)):
                chunks.append(np.array([END_OF_TEXT_ID, *encoding.ids], dtype=np.uint16))
                num_bytes += len(text.encode())
            bar.update(num_bytes - bar.n)
    return np.concatenate(chunks), num_bytes


def write_shards(ids: np.ndarray, out_dir: Path, split: str) -> list[str]:
    """Compress `ids` into <split>-NNN.bin.xz files, in place of earlier ones; returns their names."""
    for stale in out_dir.glob(f"{split}-*.bin.xz"):
        stale.unlink()
    shards = [ids[start : start + SHARD_TOKENS] for start in range(0, len(ids), SHARD_TOKENS)]
    names = [f"{split}-{number:03d}.bin.xz" for number in range(len(shards))]

    def write(name: str, shard: np.ndarray) -> None:
        raw = shard.astype("<u2").tobytes()
        (out_dir / name).write_bytes(lzma.compress(raw, format=lzma.FORMAT_XZ, filters=XZ_FILTERS))

    with ThreadPoolExecutor(COMPRESS_THREADS) as pool:  # lzma releases the GIL
        list(tqdm(pool.map(write, names, shards), desc=f"compress {split}", unit="shard", total=len(names)))
    return names


def pack(tokenizer: Tokenizer, data_dir: Path, every: int = 1) -> dict[str, dict[str, object]]:
    """Write <data>/packed and return its index: per split the tokens, bytes, shards and a digest of the ids.

    every: of the training files, take each `every`-th (speculation heads need less than the model did)."""
    out_dir = data_dir / "packed"
    out_dir.mkdir(parents=True, exist_ok=True)
    index: dict[str, dict[str, object]] = {}
    for split in SPLITS:
        ids, num_bytes = encode_corpus(
            tokenizer, data_dir / "corpus" / f"{split}.jsonl", every if split == "train" else 1
        )
        index[split] = {
            "num_tokens": len(ids),
            "num_bytes": num_bytes,
            "shards": write_shards(ids, out_dir, split),
            "sha256": hashlib.sha256(ids.astype("<u2").tobytes()).hexdigest(),
        }
    (out_dir / "index.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), **index}, indent=1))
    return index


def load_packed(packed_dir: Path, split: str) -> tuple[np.ndarray, int]:
    """Token ids (uint16) of a split and its size in bytes; raises ValueError if the shards do not match the index."""
    entry = json.loads((packed_dir / "index.json").read_text())[split]
    with ThreadPoolExecutor() as pool:
        raw = list(pool.map(lambda name: lzma.decompress((packed_dir / name).read_bytes()), entry["shards"]))
    data = b"".join(raw)
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise ValueError(f"{packed_dir}: the {split} shards are not those that index.json describes; run pack again")
    return np.frombuffer(data, dtype="<u2"), int(entry["num_bytes"])
