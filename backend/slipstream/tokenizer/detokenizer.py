"""Incremental detokenisation: new token ids in, final text out.

Standard library only. One detokenizer belongs to one sequence and to the thread that feeds it (the output thread).
Invariant: the deltas of a sequence, joined, are decode(prompt + output) without the prompt's text. An incomplete
character is held back; bytes that cannot become a character are output as U+FFFD, at the latest by `flush`.
Two implementations: a table of the vocabulary's bytes (token_table.py, well under 1 us per token) and, for decoders
without a table, decoding a short window twice with the tokenizer.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from slipstream.tokenizer.token_table import TokenTable

REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 8  # context of the window: exceeds the look-behind of any decoder
_MAX_HELD_TOKENS = 8  # tokens behind the window, none of which ends a character
_MAX_CONTEXT_BYTES = 64  # max context from a run of byte tokens


class Tokenizer(Protocol):
    """A tokenizer as detokenisation uses it. token_table None: no exact table exists. character_endings: see
    token_table.py."""

    @property
    def token_table(self) -> TokenTable | None: ...

    @property
    def character_endings(self) -> Sequence[Sequence[int]]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class IncrementalDetokenizer(Protocol):
    """is_pending: bytes of an incomplete character are held back."""

    is_pending: bool

    def push(self, token_ids: Sequence[int]) -> str:
        """Append new tokens (several after speculation). Returns the text that is now final."""
        ...

    def flush(self) -> str:
        """End the sequence. Returns the rest, an incomplete character as U+FFFD."""
        ...


def start_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
) -> IncrementalDetokenizer:
    """The detokenizer of a sequence that continues these tokens (the prompt, or its `context_token_ids`)."""
    table = tokenizer.token_table
    if table is None:
        return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    if table.has_byte_fallback:
        return ByteFallbackDetokenizer(table, prompt_token_ids, skip_special_tokens)
    return ByteLevelDetokenizer(table, prompt_token_ids, skip_special_tokens)


class ByteLevelDetokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): tokens are bytes, decoded as UTF-8 with invalid bytes replaced."""

    __slots__ = ("_pending", "_pieces", "is_pending")

    def __init__(self, table: TokenTable, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._pieces = table.select(skip_special_tokens)
        tail = _last_bytes(self._pieces, prompt_token_ids)
        start = 0
        while start < len(tail) and start < 4 and tail[start] & 0xC0 == 0x80:  # the cut may have split a character
            start += 1
        self._pending = tail[start + utf_8_decode(tail[start:], "replace", False)[1] :]
        self.is_pending = bool(self._pending)

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        if len(token_ids) == 1 and not self.is_pending:
            piece = _piece(pieces, token_ids[0])
            if piece.__class__ is str:
                return piece  # type: ignore[return-value]
        found = [_piece(pieces, token_id) for token_id in token_ids]
        data = self._pending + b"".join(_bytes(piece) for piece in found if piece)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self.is_pending = used < len(data)
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending, self.is_pending = b"", False
        return text


class NoDetokenizer:
    """For requests that want token ids alone."""

    is_pending = False

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteFallbackDetokenizer:
    """Sentencepiece (Llama 2, Mistral, Gemma): text tokens, and runs of byte tokens for other characters.

    Differs from the tokenizer in an invalid run of byte tokens: the tokenizer turns all its bytes into U+FFFD, here
    characters before the first invalid byte have been streamed already, and only bytes from there on become U+FFFD.
    """

    __slots__ = ("_is_invalid", "_pending", "_pieces", "_strip", "is_pending")

    def __init__(self, table: TokenTable, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._pieces = table.select(skip_special_tokens)
        self._pending, self._is_invalid, self.is_pending, self._strip = b"", False, False, False
        run_start = len(prompt_token_ids)
        while run_start > 0 and not isinstance(_piece(self._pieces, prompt_token_ids[run_start - 1]), str):
            run_start -= 1
        self._enter_run(prompt_token_ids[run_start:])
        has_text = any(_piece(self._pieces, token_id) for token_id in prompt_token_ids)
        self._strip = table.strips_space and not has_text

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self.is_pending:
            piece = _piece(self._pieces, token_ids[0])
            if piece.__class__ is str:
                self._is_invalid = False
                return self._stripped(piece) if self._strip else piece  # type: ignore[arg-type, return-value]
        text = self._decode(token_ids)
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        text = REPLACEMENT * len(self._pending)
        self._pending, self.is_pending = b"", False
        return text

    def _stripped(self, text: str) -> str:
        if not text:
            return text
        self._strip = False
        return text[1:] if text[0] == " " else text

    def _enter_run(self, token_ids: Sequence[int]) -> None:
        """Set the state after the byte tokens at the end of a prompt."""
        data = b"".join(piece for token_id in token_ids if isinstance(piece := _piece(self._pieces, token_id), bytes))
        try:
            self._pending = data[utf_8_decode(data, "strict", False)[1] :]
        except UnicodeDecodeError:
            self._is_invalid = True
        self.is_pending = bool(self._pending)

    def _decode(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            piece = _piece(self._pieces, token_id)
            if isinstance(piece, str):
                parts += [REPLACEMENT * len(self._pending), piece]
                self._pending, self._is_invalid = b"", False
            elif piece is not None:
                parts.append(self._decode_byte(piece))
        self.is_pending = bool(self._pending)
        return "".join(parts)

    def _decode_byte(self, byte: bytes) -> str:
        if self._is_invalid:
            return REPLACEMENT
        data = self._pending + byte
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._is_invalid, self._pending = True, b""
            return REPLACEMENT * len(data)
        self._pending = data[used:]
        return text


class WindowDetokenizer:
    """Any tokenizer: the new text is decode(window + new tokens) minus decode(window).

    U+FFFD at the end of a text is the beginning of a character only if more bytes make one of it: they are tried.
    """

    __slots__ = ("_base", "_is_skipping", "_is_window_open", "_new_ids", "_tokenizer", "_window", "is_pending")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._is_skipping = skip_special_tokens
        self._window = context_token_ids(tokenizer, prompt_token_ids, skip_special_tokens)
        text, self.is_pending = self._decode([])
        self._base = len(text)  # excludes a character that the prompt leaves incomplete
        self._is_window_open = self.is_pending
        self._new_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._new_ids = [*self._new_ids, *token_ids]  # a new list: copies of a started detokenizer share the old one
        text, self.is_pending = self._decode(self._new_ids)
        delta = text[self._base :]
        self._base = max(self._base, len(text))
        if self.is_pending:
            self._move_to_last_character()
        elif delta:
            self._move(len(self._new_ids))
        else:  # only skipped special tokens: they give no context, so the window stays
            self._new_ids = self._new_ids[-_WINDOW_TOKENS:]
        return delta

    def flush(self) -> str:
        self.is_pending = False
        text = self._tokenizer.decode(self._window + self._new_ids, self._is_skipping)
        delta = text[self._base :]
        self._base = max(self._base, len(text))
        return delta

    def _decode(self, new_ids: list[int]) -> tuple[str, bool]:
        """The text that no further token changes, and whether a character begins behind it."""
        token_ids = self._window + new_ids
        text = self._tokenizer.decode(token_ids, self._is_skipping)
        if text.endswith(REPLACEMENT):
            for ending in self._tokenizer.character_endings:
                completed = self._tokenizer.decode([*token_ids, *ending], self._is_skipping)
                if not completed.endswith(REPLACEMENT):
                    return completed[:-1], True
        return text, False

    def _move_to_last_character(self) -> None:
        """Move the window to the last tokens before the incomplete character."""
        num_new = len(self._new_ids)
        for num_taken in range(num_new - 1, max(0, num_new - 4), -1):
            if not self._decode(self._new_ids[:num_taken])[1]:
                self._move(num_taken)
                return
        if num_new >= _MAX_HELD_TOKENS:  # bytes that begin a character, each again, or tokens without text
            self._move(num_new)

    def _move(self, num_taken: int) -> None:
        """Make the first new tokens the window, behind the old one if that ends within a character."""
        taken, self._new_ids = self._new_ids[:num_taken], self._new_ids[num_taken:]
        self._window = self._window + taken if self._is_window_open else taken
        text, self._is_window_open = self._decode([])
        if self._is_window_open:
            self._window = [one for one in self._window if self._tokenizer.decode([one], self._is_skipping)]
            self._window = self._window[-2 * _WINDOW_TOKENS :]
        is_whole = not self._new_ids and not self._is_window_open
        self._base = len(text if is_whole else self._decode(self._new_ids)[0])


def decode_after(
    tokenizer: Tokenizer,
    context: Sequence[int],
    token_ids: Sequence[int],
    skip_special_tokens: bool = True,
    num_characters: int | None = None,
) -> str:
    """The text that token_ids add after the context, without state.

    num_characters None: without an incomplete last character. Otherwise the first num_characters of the flushed text,
    which equals the text of a stream that ended here or was cut at a stop string.
    """
    detokenizer = start_detokenizer(tokenizer, context, skip_special_tokens)
    text = detokenizer.push(token_ids)
    return text if num_characters is None else (text + detokenizer.flush())[:num_characters]


def context_token_ids(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
    """The last of token_ids that have text: as many as give `decode_after` the same result as all of them. Each
    response of a stream has them, so those without text, of which a prompt may be full, are left out."""
    table = tokenizer.token_table
    if table is None:
        return _window(tokenizer, token_ids, skip_special_tokens)
    pieces, found, num_bytes = table.select(skip_special_tokens), list[int](), 0
    for token_id in reversed(token_ids):
        piece = _piece(pieces, token_id)
        if piece is None or (not piece and token_id in found[-1:]):
            continue
        found.append(token_id)
        num_bytes += len(piece)
        if (piece and isinstance(piece, str)) or num_bytes >= (_MAX_CONTEXT_BYTES if table.has_byte_fallback else 4):
            break
    return found[::-1]


def _window(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """A suffix of at least _WINDOW_TOKENS that begins at a whole character and decodes to some text.

    A character has four tokens at most. What begins with U+FFFD for longer is none, and looked through in larger steps.
    """
    size = _WINDOW_TOKENS
    while size < len(token_ids):
        text = tokenizer.decode(token_ids[-size:], skip_special_tokens)
        if text and not text.startswith(REPLACEMENT):
            break
        size += 1 if text and size < 2 * _WINDOW_TOKENS else size
    return list(token_ids[-size:])


def _piece(pieces: list[str | bytes | None], token_id: int) -> str | bytes | None:
    """The piece of a token; None also outside the vocabulary (padded embeddings), as decoders skip such ids."""
    return pieces[token_id] if token_id < len(pieces) else None


def _last_bytes(pieces: list[str | bytes | None], token_ids: Sequence[int]) -> bytes:
    """At least the last four bytes of the tokens' text, or all of it."""
    data, position = b"", len(token_ids)
    while position > 0 and len(data) < 4:
        position -= 1
        piece = _piece(pieces, token_ids[position])
        if piece:
            data = _bytes(piece) + data
    return data


def _bytes(piece: str | bytes) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode("utf-8")
