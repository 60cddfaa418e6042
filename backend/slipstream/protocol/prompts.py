"""The prompt of a request: text or token ids -> token ids, bounded before the work is done.

Standard library only, no state; runs on the input thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.core.config import EngineConfig
from slipstream.core.errors import RequestError
from slipstream.core.setting_values import refuse
from slipstream.protocol.client_settings import Settings

CHARS_PER_TOKEN = 16  # of a reference, or of a prompt that is truncated; the rest of a text is not encoded
_LEAST_END_CHARS = 4096  # of a prompt that is truncated: the border is far from the tokens kept
_BORDER_TOKENS = 64  # behind the border that may differ from those of the whole text
_PIECE_CHARS = 16384  # of a reference, encoded at once: what it becomes at the borders does not matter


class TextCodec(Protocol):
    """The part of a tokenizer (tokenizer/tokenizer.py) that parsing uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...

    def surely_exceeds(self, text: str, max_tokens: int) -> int: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    @property
    def max_token_bytes(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def read_prompt(
    settings: Settings, config: EngineConfig, tokenizer: TextCodec, max_tokens: int
) -> tuple[list[int], str | None]:
    """Token ids of the prompt, and its text if the client sent text and all of it is used."""
    num_kept = _num_kept(settings, config, max_tokens)
    text, token_ids = settings.get("prompt"), settings.get("prompt_token_ids")
    if text is not None and token_ids is not None:
        raise RequestError("text_input", "given together with input_ids, accepted: one of them")
    if token_ids is not None:
        length = settings.get("prompt_length", len(token_ids))
        if not 0 <= length <= len(token_ids):
            raise refuse("input_lengths", length, f"at most the {len(token_ids)} input_ids given")
        if length == 0:
            raise RequestError("input_ids", "the prompt is empty, accepted: at least one token to go on from")
        return list(token_ids[max(0, length - num_kept) if num_kept else 0 : length]), None
    if text is None:
        raise RequestError("text_input", "missing, accepted: a prompt as text_input or as input_ids")
    add_special_tokens = settings.get("add_special_tokens", config.serving.add_special_tokens)
    if num_kept:
        return _encode_end(text, tokenizer, add_special_tokens, num_kept), None
    return encode_prompt("text_input", text, tokenizer, add_special_tokens, config.model.max_model_len), text


def _num_kept(settings: Settings, config: EngineConfig, max_tokens: int) -> int:
    """Tokens of the prompt to keep; 0: all."""
    asked, max_model_len = settings.get("truncate_prompt_tokens"), config.model.max_model_len
    if asked == -1:
        return max_model_len and max_model_len - (max_tokens if max_tokens < max_model_len else 1)
    if asked is not None and not 1 <= asked <= (max_model_len or asked):
        accepted = f"1 to max_model_len={max_model_len}, or -1" if max_model_len else "an integer from 1"
        raise refuse("truncate_prompt_tokens", asked, accepted)
    return asked or 0


def _encode_end(text: str, tokenizer: TextCodec, add_special_tokens: bool, num_kept: int) -> list[int]:
    """The last tokens of a text behind the tokenizer's own first ones. No more is encoded than max_model_len bounds: of
    a text with many tokens as much as has these, because each takes some 380 bytes of memory."""
    most_chars = max(_LEAST_END_CHARS, num_kept * CHARS_PER_TOKEN)
    num_chars = max(_LEAST_END_CHARS, num_kept)
    token_ids = tokenizer.encode(text[-num_chars:], False) if text else []
    while len(token_ids) < num_kept + _BORDER_TOKENS and num_chars < min(most_chars, len(text)):
        num_chars *= 2
        token_ids = tokenizer.encode(text[-num_chars:], False)
    if not token_ids:
        raise RequestError("text_input", "the prompt is empty, accepted: text of at least one token to go on from")
    first = tokenizer.encode("", True) if add_special_tokens else []
    return [*first, *token_ids[-(num_kept - len(first)) :]] if len(first) < num_kept else token_ids[-num_kept:]


def encode_reference(text: str, tokenizer: TextCodec, max_tokens: int) -> list[int]:
    """About the first max_tokens tokens of a text that the output may repeat; 0: all."""
    limit, token_ids = max_tokens * CHARS_PER_TOKEN or len(text), list[int]()
    for start in range(0, min(len(text), limit), _PIECE_CHARS):
        token_ids += tokenizer.encode(text[start : min(start + _PIECE_CHARS, limit)], False)
        if max_tokens and len(token_ids) >= max_tokens:
            break
    return token_ids[:max_tokens] if max_tokens else token_ids


def encode_prompt(
    name: str, text: str, tokenizer: TextCodec, add_special_tokens: bool, max_model_len: int
) -> list[int]:
    """Token ids of a prompt given as text. max_model_len: 0 if unknown.

    Raises RequestError for an empty text and, before the work is done, for one that cannot fit: encoding takes half a
    second per megabyte.
    """
    if max_model_len:
        check_prompt_bytes(name, len(text.encode("utf-8")), tokenizer, max_model_len)
        num_chars = tokenizer.surely_exceeds(text, max_model_len)
        if num_chars:
            accepted = f"accepted: at most {max_model_len - 1} (max_model_len={max_model_len} less one output token)"
            raise RequestError(
                name,
                f"the prompt has more than {max_model_len} tokens in the first {num_chars} of its {len(text)} "
                f"characters, {accepted}",
            )
    ids = tokenizer.encode(text, add_special_tokens) if text else []
    if not ids:
        raise RequestError(name, "the prompt is empty, accepted: text of at least one token to go on from")
    return ids


def check_prompt_bytes(name: str, num_bytes: int, tokenizer: TextCodec, max_model_len: int) -> None:
    """Raises RequestError for a text that has more bytes than max_model_len of the longest tokens."""
    limit = max_model_len * tokenizer.max_token_bytes
    if num_bytes > limit:
        accepted = f"at most {limit} (max_model_len={max_model_len} tokens of {tokenizer.max_token_bytes} bytes)"
        raise RequestError(name, f"the prompt has {num_bytes} bytes, accepted: {accepted}")
