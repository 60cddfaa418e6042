"""The engine's log-probabilities (one JSON object per token, by token id) -> OpenAI's two forms. Pure functions."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any

import orjson

from slipstream.server.model_tokenizer import ModelTokenizer
from slipstream.server.sse import Written, to_bytes

_PART_CHARS = 64 << 10
# The border of two entries, as the engine writes them. A quotation mark in a token's text has a backslash, and one that
# ends a text has no digit behind it.
_BORDER = re.compile(r'(?<=\}\}), (?=\{"\d)')
Entry = dict[str, dict[str, Any]]  # token id -> logprob, rank, decoded_token; the chosen token first


@dataclass(frozen=True)
class LogprobForm:
    """num_top: alternatives to show beside those asked for by id; -1: all. shows_ids: tokens are shown as
    "token_id:7", so that equal texts are told apart."""

    tokenizer: ModelTokenizer
    num_top: int = 0
    shows_ids: bool = False

    def name(self, token_id: str, value: dict[str, Any]) -> str:
        return f"token_id:{token_id}" if self.shows_ids else value["decoded_token"]

    def exact(self, token_id: str, value: dict[str, Any]) -> bytes:
        return bytes(self.tokenizer.bytes_of(int(token_id), value["decoded_token"]))

    def top(self, entry: Entry) -> list[tuple[str, dict[str, Any]]]:
        """The likeliest tokens by rank, then those without one, which the client asked for by id."""
        num_top = inf if self.num_top == -1 else self.num_top
        return _by_rank(pair for pair in entry.items() if pair[1]["rank"] is None or pair[1]["rank"] <= num_top)

    def top_and_chosen(self, entry: Entry) -> list[tuple[str, dict[str, Any]]]:
        """`top`, and the chosen token in its place: what completions have, which may be one more than asked for."""
        return _by_rank({**dict([next(iter(entry.items()))]), **dict(self.top(entry))}.items())


def _by_rank(pairs: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(pairs, key=lambda pair: inf if pair[1]["rank"] is None else pair[1]["rank"])


def parse(text: str) -> list[Entry | None]:
    """The entries of a response; None for the first token of a prompt, which has no context."""
    return list(chain.from_iterable(_parts(text)))


def _parts(text: str) -> Iterator[list[Entry | None]]:
    """The entries in parts that take a millisecond each to read: a million alternatives at once take half a second, in
    which no other thread runs. A text of one part has its border elsewhere, or none."""
    at, opening = 0, ""
    while (border := _BORDER.search(text, at + _PART_CHARS)) is not None:
        yield orjson.loads(f"{opening}{text[at : border.start()]}]")
        at, opening = border.end(), "["
    yield orjson.loads(opening + text[at:]) or [] if text else []


def written_chat_logprobs(text: str, form: LogprobForm) -> Written:
    """chat_logprobs of the entries of a whole answer, as JSON."""
    parts = (to_bytes(chat_logprobs(entries, form)["content"])[1:-1] for entries in _parts(text))
    return Written(b'{"content":[%s],"refusal":null}' % b",".join(part for part in parts if part))


def chat_logprobs(entries: list[Entry | None], form: LogprobForm) -> dict[str, Any]:
    return {"content": [_chat_entry(entry, form) for entry in entries if entry], "refusal": None}


def _chat_entry(entry: Entry, form: LogprobForm) -> dict[str, Any]:
    chosen = next(iter(entry.items()))
    return {
        **_token(*chosen, form),
        "top_logprobs": [_token(token_id, value, form) for token_id, value in form.top(entry)],
    }


def _token(token_id: str, value: dict[str, Any], form: LogprobForm) -> dict[str, Any]:
    return {
        "token": form.name(token_id, value),
        "logprob": value["logprob"],
        "bytes": list(form.exact(token_id, value)),
    }


def completion_logprobs(
    entries: list[Entry | None], form: LogprobForm, offset: int = 0, first: str = ""
) -> dict[str, Any]:
    """offset: characters of the text before these tokens. first: the text of a token without an entry."""
    tokens, chosen, top, offsets = [], [], [], []
    decoder = getincrementaldecoder("utf-8")("replace")  # a token may be part of a character
    for entry in entries:
        offsets.append(offset)
        token_id, value = next(iter(entry.items())) if entry else ("", {"logprob": None, "decoded_token": first})
        tokens.append(form.name(token_id, value) if entry else first)
        chosen.append(value["logprob"])
        top.append({form.name(*pair): pair[1]["logprob"] for pair in form.top_and_chosen(entry)} if entry else None)
        offset += len(decoder.decode(form.exact(token_id, value) if entry else first.encode("utf-8", "replace")))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def first_token_text(prompt: str | Sequence[int], entries: list[Entry | None], form: LogprobForm) -> str:
    """The text of a prompt's first token, which has no entry. entries: of the prompt.

    It is what the other tokens leave of a text; empty for a special token in front, which is no part of the text.
    """
    if not isinstance(prompt, str):
        return bytes(form.tokenizer.bytes_of(prompt[0], "")).decode("utf-8", "replace")
    others = sum(len(form.exact(*next(iter(entry.items())))) for entry in entries if entry)
    data = prompt.encode("utf-8", "replace")
    return data[: max(0, len(data) - others)].decode("utf-8", "replace")
