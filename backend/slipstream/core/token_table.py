"""A vocabulary as a table: token id -> the text or bytes that it stands for, so that decoding is a list look-up.

Standard library only; immutable once built, shared by all threads. Built from what `tokenizers` says of a tokenizer:
its vocabulary and its decoder's JSON. A decoder of a shape that is not known here gives no table (detokenize.py then
calls the tokenizer itself), because a table is only worth having when it is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# text; bytes that are no whole characters (byte level), or one byte token (fallback); nothing
Piece = str | bytes | None

# A text can be cut here, before the space, where no token spans it: tokenizers begin a word with the space before it.
CUT = re.compile("[A-Za-z0-9](?= )")
_BYTES_CUT = re.compile(CUT.pattern.encode())
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True)
class TokenTable:
    """pieces[id] with special tokens shown, visible_pieces[id] with them left out (None).

    has_byte_fallback: a bytes piece is one byte of a run of byte tokens (sentencepiece); else byte-level BPE.
    strips_space: the decoder drops one space at the very start of the text (sentencepiece's dummy prefix).
    """

    pieces: list[Piece]
    visible_pieces: list[Piece]
    has_byte_fallback: bool
    strips_space: bool

    def select(self, skip_special_tokens: bool) -> list[Piece]:
        return self.visible_pieces if skip_special_tokens else self.pieces

    @property
    def max_bytes(self) -> int:
        """No token stands for more bytes of a text."""
        return max((len(_bytes(piece)) for piece in self.pieces if piece), default=0)

    @property
    def spans_cuts(self) -> bool:
        """Whether any token holds a place where `CUT` would cut a text."""
        return any(_BYTES_CUT.search(_bytes(piece)) for piece in self.pieces if piece)


def build_token_table(
    vocabulary: Mapping[str, int], decoder: Mapping[str, Any] | None, special_ids: Collection[int]
) -> TokenTable | None:
    """The table of a tokenizer, or None when its decoder is not one of the shapes handled exactly.

    vocabulary: token -> id with added tokens. decoder: the `decoder` entry of tokenizer.json.
    """
    piece_of = _byte_level_piece if _is_byte_level(decoder) else _sentencepiece_reader(decoder)
    if piece_of is None:
        return None
    pieces: list[Piece] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = piece_of(token)
    visible = list(pieces)
    for token_id in special_ids:
        if token_id < len(visible):
            visible[token_id] = None
    is_byte_level = piece_of is _byte_level_piece
    return TokenTable(pieces, visible, not is_byte_level, not is_byte_level and _strips_space(decoder))


def _bytes(piece: str | bytes) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode("utf-8")


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a decoder: those of a Sequence, else itself."""
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    return [part["type"] for part in _parts(decoder)] == ["ByteLevel"]


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (`bytes_to_unicode` of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_level_alphabet()


def _byte_level_piece(token: str) -> Piece:
    """A token with a character outside the alphabet is an added token that stands for its own text."""
    try:
        data = bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _sentencepiece_reader(decoder: Mapping[str, Any] | None) -> Callable[[str], Piece] | None:
    """The reader of one token for Replace, ByteFallback, Fuse[, Strip of one space] (Llama 2, Mistral, Gemma)."""
    parts = _parts(decoder)
    kinds = [part["type"] for part in parts]
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return None
    pattern, content = parts[0]["pattern"], parts[0]["content"]
    if "String" not in pattern:
        return None
    if kinds[-1] == "Strip" and (parts[-1]["content"], parts[-1]["start"], parts[-1]["stop"]) != (" ", 1, 0):
        return None
    needle = pattern["String"]

    def read(token: str) -> Piece:
        text = token.replace(needle, content)
        byte = _BYTE_TOKEN.match(text)
        return bytes([int(byte[1], 16)]) if byte else text

    return read


def _strips_space(decoder: Mapping[str, Any] | None) -> bool:
    return any(part["type"] == "Strip" for part in _parts(decoder))


def table_agrees(table: TokenTable, decode: Callable[[Sequence[int], bool], str], num_probes: int = 64) -> bool:
    """Whether single tokens and short runs, spread over the vocabulary, decode as the tokenizer itself says.

    Runs are of whole-text tokens only: in those the two must agree character for character.
    """
    whole = [token_id for token_id, piece in enumerate(table.visible_pieces) if isinstance(piece, str)]
    if not whole:
        return False
    for probe in range(num_probes):
        run = [whole[(probe * 7919 + step * 104729) % len(whole)] for step in range(1 + probe % 4)]
        text = "".join(str(table.visible_pieces[token_id]) for token_id in run)
        if table.strips_space and text.startswith(" "):
            text = text[1:]
        if decode(run, True) != text:
            return False
    return True
