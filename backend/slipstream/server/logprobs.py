"""The engine's log-probabilities (one JSON object per token, by token id) -> OpenAI's two forms. Pure functions."""

from __future__ import annotations

import json
from typing import Any

from slipstream.server.token_bytes import TokenBytes

Entry = dict[str, dict[str, Any]]  # token id -> logprob, rank, decoded_token; the chosen token first


def parse(text: str) -> list[Entry | None]:
    """The entries of a response; None for the first token of a prompt, which has no context."""
    return json.loads(text) or [] if text else []


def chat_logprobs(entries: list[Entry | None], num_top: int, token_bytes: TokenBytes) -> dict[str, Any]:
    return {"content": [_chat_entry(entry, num_top, token_bytes) for entry in entries if entry], "refusal": None}


def _chat_entry(entry: Entry, num_top: int, token_bytes: TokenBytes) -> dict[str, Any]:
    tokens = [_token(int(token_id), value, token_bytes) for token_id, value in entry.items()]
    ranked = sorted(zip(entry.values(), tokens), key=lambda pair: pair[0]["rank"])
    return {**tokens[0], "top_logprobs": [token for value, token in ranked if value["rank"] <= num_top]}


def _token(token_id: int, value: dict[str, Any], token_bytes: TokenBytes) -> dict[str, Any]:
    text = value["decoded_token"]
    return {"token": text, "logprob": value["logprob"], "bytes": token_bytes.of(token_id, text)}


def completion_logprobs(entries: list[Entry | None], num_top: int, offset: int) -> dict[str, Any]:
    """offset: characters of the text before these tokens."""
    tokens, chosen, top, offsets = [], [], [], []
    for entry in entries:
        values = list(entry.values()) if entry else []
        tokens.append(values[0]["decoded_token"] if values else "")
        chosen.append(values[0]["logprob"] if values else None)
        ranked = sorted((value for value in values if value["rank"] <= num_top), key=lambda value: value["rank"])
        top.append({value["decoded_token"]: value["logprob"] for value in ranked} if values else None)
        offsets.append(offset)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}
