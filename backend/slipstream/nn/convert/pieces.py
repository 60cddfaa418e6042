"""Sentencepiece's BPE as a tokenizer of the library `tokenizers`: words marked by U+2581, byte tokens for the rest.

Used for tokenizer.model files and for GGUF files, which hold the same pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from slipstream.core.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of sentencepiece's pieces
MARK = "▁"  # stands for a space
MAX_MERGES = 4 << 20  # of a vocabulary of 262,144 pieces: 580,000


@dataclass(frozen=True)
class Pieces:
    """texts, scores, kinds: of each id. unknown: the piece for characters that are none of the others.

    has_prefix: a space is put before each text between special tokens, as ChatGLM and Llama 2's tokenizer.json do.
    added: tokens beyond the pieces, by id.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unknown: str
    has_prefix: bool = True
    has_byte_fallback: bool = True
    strips_spaces: bool = False
    charsmap: bytes = b""
    added: Mapping[int, AddedToken] = field(default_factory=dict)


def build(pieces: Pieces) -> Tokenizer:
    """Raises ConfigError for a vocabulary whose merges would take memory without bound."""
    vocab = {text: token_id for token_id, text in enumerate(pieces.texts)}
    merges = _merges(pieces, vocab)
    vocab |= {token.content: token_id for token_id, token in pieces.added.items()}
    model = models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=pieces.unknown,
        fuse_unk=True,
        byte_fallback=pieces.has_byte_fallback,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(_normalizers(pieces))
    strip = [decoders.Strip(" ", 1, 0)] if pieces.has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_tokens([*_own_tokens(pieces), *pieces.added.values()])
    return tokenizer


def _normalizers(pieces: Pieces) -> list[Any]:
    steps: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.strips_spaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = [normalizers.Prepend(MARK)] if pieces.has_prefix else []
    return [*steps, *prefix, normalizers.Replace(" ", MARK)]


def _own_tokens(pieces: Pieces) -> list[AddedToken]:
    """Pieces that a text is never split inside. A control piece stands for no text, and no text becomes one."""
    return [
        AddedToken(text, special=kind == CONTROL, normalized=MARK in text and not pieces.has_prefix)
        for text, kind in zip(pieces.texts, pieces.kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _merges(pieces: Pieces, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a third, the best scored third first, as sentencepiece joins them."""
    joined = {text for text, kind in zip(pieces.texts, pieces.kinds) if kind in (NORMAL, UNUSED)}
    found: list[tuple[str, str]] = []
    for text in sorted(joined, key=lambda text: -pieces.scores[vocab[text]]):
        found += [
            (text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in joined and text[cut:] in joined
        ]
        if len(found) > MAX_MERGES:
            raise ConfigError("tokenizer", f"{len(pieces.texts)} pieces", f"accepted: at most {MAX_MERGES} merges")
    return found
