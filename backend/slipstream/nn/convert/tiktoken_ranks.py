"""Tiktoken's files, a line with base64 and rank per token, as a byte-level tokenizer of the library `tokenizers`.

The file does not say which pattern splits a text first; it is known by the model. An unknown one is refused: another
pattern would give other tokens, silently.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from slipstream.core.errors import ConfigError
from slipstream.nn.convert.pieces import MAX_MERGES

MAX_RANKS = 1 << 20
MAX_TOKEN_BYTES = 512
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# model_type of config.json -> pattern: GLM-4's tokenization_chatglm.py, Qwen's tokenization_qwen.py
PATTERNS = {"chatglm": rf"{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}", "qwen": rf"{_WORDS}|\p{{N}}|{_MARKS}"}
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))


def read(file: Path, config: Mapping[str, Any], added: dict[int, AddedToken]) -> Tokenizer:
    """added: special tokens by id; Qwen's, which are in its code alone, are put into it. Raises ConfigError."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    model_type = config.get("model_type")
    if model_type not in PATTERNS:
        reason = f"model_type {model_type!r} of config.json has no known pattern; accepted: {', '.join(PATTERNS)}"
        raise ConfigError("tokenizer", str(file), reason)
    ranks = _read_ranks(file)
    if model_type == "qwen" and not added:
        added |= {
            len(ranks) + index: AddedToken(text, special=True, normalized=False)
            for index, text in enumerate(QWEN_TOKENS)
        }
    special = [token.content for _, token in sorted(added.items())]

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks  # tiktoken's own function keeps copies by path, which may be stale

    return Converter(str(file), PATTERNS[model_type], extra_special_tokens=special).converted()


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines()):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            is_good = int(rank) == number and 0 < len(token) <= MAX_TOKEN_BYTES and token not in ranks
        except (ValueError, binascii.Error):
            is_good = False
        if not is_good or number >= MAX_RANKS:
            form = f"base64 of 1 to {MAX_TOKEN_BYTES} bytes and the rank {number}, at most {MAX_RANKS} lines"
            raise ConfigError("tokenizer", str(file), f"line {number + 1}: accepted: {form}")
        ranks[token] = number
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise ConfigError("tokenizer", str(file), f"has no token for byte {absent[0]}; accepted: one for every byte")
    _check_merges(ranks, file)
    return ranks


def _check_merges(ranks: Mapping[bytes, int], file: Path) -> None:
    """Raises ConfigError for ranks whose merges would take memory without bound."""
    total = 0
    for token in ranks:
        total += sum(token[:cut] in ranks and token[cut:] in ranks for cut in range(1, len(token)))
        if total > MAX_MERGES:
            raise ConfigError("tokenizer", str(file), f"has more than {MAX_MERGES} merges; accepted: at most that")
