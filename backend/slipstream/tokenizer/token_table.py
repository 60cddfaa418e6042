"""A vocabulary as a table: token id -> text or bytes, so that decoding is a list look-up.

Standard library only; immutable once built, shared by all threads. Built from the vocabulary and the decoder JSON of
`tokenizers`. An unknown type of decoder has no table, because a table must be exact; detokenize.py then calls the
tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# text; bytes of incomplete characters (byte level) or of one byte token (byte fallback); no text
Piece = str | bytes | None

# Cut point of a text, before the space: tokenizers attach the space to the next word, so few tokens span it.
CUT = re.compile("[A-Za-z0-9](?= )")
_BYTES_CUT = re.compile(CUT.pattern.encode())
_CONTINUING = "<0x80>", "\u0122", "<0xBF>", "\u00bf"  # the tokens of two bytes, by byte fallback and byte level
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
        """Length in bytes of the longest token."""
        return max((len(_bytes(piece)) for piece in self.pieces if piece), default=0)

    @property
    def spans_cuts(self) -> bool:
        """Whether any token contains a cut point."""
        return any(_BYTES_CUT.search(_bytes(piece)) for piece in self.pieces if piece)


def build_token_table(
    vocabulary: Mapping[str, int], decoder: Mapping[str, Any] | None, special_ids: Collection[int]
) -> TokenTable | None:
    """The table of a tokenizer, or None if its type of decoder is not handled exactly.

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
    """The piece of a byte-level token. A character outside the alphabet marks an added token, which is plain text."""
    try:
        data = bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _sentencepiece_reader(decoder: Mapping[str, Any] | None) -> Callable[[str], Piece] | None:
    """Maps a token to its piece for decoders Replace, ByteFallback, Fuse[, Strip of one space]; None for others."""
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


def character_endings(vocabulary: Mapping[str, int], decode: Callable[[Sequence[int], bool], str]) -> list[list[int]]:
    """Token ids of which some complete any character that a text leaves incomplete; none without tokens of bytes.

    Behind each beginning of a character one to three bytes 0x80 or as many 0xBF make a valid one.
    """
    found = [vocabulary[token] for token in _CONTINUING if token in vocabulary]
    found = [token_id for token_id in found if decode([token_id], False) == "\ufffd"]
    return [[token_id] * num_bytes for token_id in found for num_bytes in (1, 2, 3)]


def table_agrees(table: TokenTable, decode: Callable[[Sequence[int], bool], str], num_probes: int = 64) -> bool:
    """Whether the table and the tokenizer decode samples alike: single tokens and short runs over the vocabulary.

    Only text tokens are sampled.
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
