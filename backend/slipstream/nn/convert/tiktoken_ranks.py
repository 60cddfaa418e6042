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
_LARGE, _SMALL = (rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_ENDS, _BEFORE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"[^\r\n\p{L}\p{N}]?"
_KIMI_WORDS = rf"[\p{{Han}}]+|{_BEFORE}{_LARGE}*{_SMALL}+{_ENDS}|{_BEFORE}{_LARGE}+{_SMALL}*{_ENDS}"
KIMI = "kimi_k2"
# model_type of config.json -> pattern: of tokenization_chatglm.py (GLM-4), tokenization_qwen.py, tokenization_kimi.py
PATTERNS = {
    "chatglm": rf"{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}",
    "qwen": rf"{_WORDS}|\p{{N}}|{_MARKS}",
    KIMI: rf"{_KIMI_WORDS}|\p{{N}}{{1,3}}|{_MARKS}",
}
MOONSHOT_CODE = ("tokenization_kimi.", "tokenization_moonshot.")  # of one tokenizer, under several model_types
NUM_KIMI_TOKENS = 256  # behind the ranks, of which tokenizer_config.json names some
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))


def model_of(config: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Under which name of PATTERNS a tokenizer is, if it is known. settings: tokenizer_config.json."""
    auto_map = settings.get("auto_map")
    code = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    if any(str(part).startswith(MOONSHOT_CODE) for part in (code if isinstance(code, list) else [code])):
        return KIMI
    return config.get("model_type")


def read(file: Path, model_type: str | None, added: dict[int, AddedToken]) -> Tokenizer:
    """model_type: as model_of has it. added: special tokens by id; those in the model's code alone are put into it.

    Raises ConfigError.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if model_type not in PATTERNS:
        reason = f"model_type {model_type!r} of config.json has no known pattern; accepted: {', '.join(PATTERNS)}"
        raise ConfigError("tokenizer", str(file), reason)
    ranks = _read_ranks(file)
    if model_type == "qwen" and not added:
        added |= {
            len(ranks) + index: AddedToken(text, special=True, normalized=False)
            for index, text in enumerate(QWEN_TOKENS)
        }
    if model_type == KIMI:
        for token_id in range(len(ranks), len(ranks) + NUM_KIMI_TOKENS):
            added.setdefault(token_id, AddedToken(f"<|reserved_token_{token_id}|>", special=True, normalized=False))
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
