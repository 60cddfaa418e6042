"""Texts that tokenizers disagree on most easily, and a tiktoken file whose ids are compared on them."""

from __future__ import annotations

import base64
import random
from pathlib import Path

from toy_tokenizers import TEXTS, byte_level

COMBINING = "e\u0301\u0327"  # by NFKC, the marks change places: the map of `tokenizers` does not see them together
HARD_TEXTS = [
    *TEXTS[:6],
    "",
    " ",
    "   three   spaces   ",
    "\n\n\tdef f(x):\r\n        return x  \n",
    "<s></s><unk> <0x41> ▁▁ literal",
    "a" * 70,
    "1234567890 3.14 -1e-9 １２３",
    "don't we'll I'M THEY'RE",
    "\u00a0no-break\u2009thin\u200bzero \ufeffbom",
    "Ǆ ﬁ ① ㍿ ℡",
    COMBINING,
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 👩‍👩‍👧‍👦 🏳️‍🌈 \U0010ffff",
    "مرحبا שלום नमस्ते สวัสดี こんにちは 안녕",
]


def random_texts(count: int) -> list[str]:
    generator = random.Random(5)
    alphabet = "abcdefgThe quick  \n\t.,!?0123äß你好éЖ▁🏳<>s/" + "".join(TEXTS[:6])
    return ["".join(generator.choices(alphabet, k=generator.randrange(1, 40))) for _ in range(count)]


def write_ranks(file: Path) -> dict[bytes, int]:
    """A vocabulary whose tokens are ordered as they were merged."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    to_byte = {char: byte for byte, char in bytes_to_unicode().items()}
    added = set(byte_level().get_added_tokens_decoder())
    vocabulary = sorted(
        (token_id, text) for text, token_id in byte_level().get_vocab().items() if token_id not in added
    )
    tokens = [bytes(to_byte[char] for char in text) for _, text in vocabulary]
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return {token: rank for rank, token in enumerate(tokens)}
