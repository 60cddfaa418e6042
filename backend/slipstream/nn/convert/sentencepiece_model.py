"""Sentencepiece's tokenizer.model, a protobuf message, as a tokenizer of the library `tokenizers`.

transformers has the message's classes; they need the package protobuf (`pip install 'slipstream[convert]'`). Those of
the package sentencepiece need a newer protobuf than tritonclient accepts.
Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from slipstream.core.errors import ConfigError
from slipstream.nn.convert.pieces import CONTROL, UNUSED, USER_DEFINED, Pieces, build

MAX_PIECES = 1 << 20
MAX_PIECE_CHARS = 512
BPE = 2
MODEL_TYPES = {1: "unigram", 3: "word", 4: "char"}
_RESERVED = re.compile(r"<reserved_\d+>")  # Baichuan's spare tokens, two of which are its roles


def num_pieces(file: Path) -> int:
    return len(_message(file).pieces)


def read(file: Path, added: Mapping[int, AddedToken]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and its first, last and unknown token by Hugging Face's names. Raises ConfigError."""
    message = _message(file)
    kinds = [
        USER_DEFINED if piece.type not in (CONTROL, UNUSED) and _RESERVED.fullmatch(piece.piece) else piece.type
        for piece in message.pieces
    ]
    texts = [piece.piece for piece in message.pieces]
    trainer, rules = message.trainer_spec, message.normalizer_spec
    unknown = texts[trainer.unk_id] if 0 <= trainer.unk_id < len(texts) else ""
    tokenizer = build(
        Pieces(
            texts,
            [piece.score for piece in message.pieces],
            kinds,
            unknown,
            has_prefix=rules.add_dummy_prefix,
            has_byte_fallback=trainer.byte_fallback,
            strips_spaces=rules.remove_extra_whitespaces,
            charsmap=rules.precompiled_charsmap,
            added={token_id: token for token_id, token in added.items() if token_id >= len(texts)},
        )
    )
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    return tokenizer, {name: texts[token_id] for name, token_id in ids.items() if 0 <= token_id < len(texts)}


@lru_cache(maxsize=1)
def _message(file: Path) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from transformers.utils import sentencepiece_model_pb2_new as classes
    except ImportError as error:
        needed = "reading sentencepiece's tokenizer.model needs protobuf: pip install 'slipstream[convert]'"
        raise ConfigError("tokenizer", str(file), needed) from error
    message = classes.ModelProto()  # type: ignore[attr-defined]  # made when it is imported
    try:
        message.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise ConfigError("tokenizer", str(file), f"neither sentencepiece's nor tiktoken's format: {error}") from error
    _check(message, file)
    return message


def _check(message: Any, file: Path) -> None:
    kind = message.trainer_spec.model_type
    if kind != BPE:
        raise ConfigError("tokenizer", str(file), f"is a {MODEL_TYPES.get(kind, kind)} model; accepted: BPE")
    if not 0 < len(message.pieces) <= MAX_PIECES:
        raise ConfigError("tokenizer", str(file), f"has {len(message.pieces)} pieces; accepted: 1 to {MAX_PIECES}")
    seen: set[str] = set()
    for token_id, piece in enumerate(message.pieces):
        if not 0 < len(piece.piece) <= MAX_PIECE_CHARS or piece.piece in seen:
            reason = f"piece {token_id} must have 1 to {MAX_PIECE_CHARS} characters, and be there once"
            raise ConfigError("tokenizer", str(file), reason)
        seen.add(piece.piece)
        if piece.type == UNUSED:
            raise ConfigError("tokenizer", str(file), f"piece {token_id} is marked as unused, which is not supported")
