"""Embeddings that a client sends for some tokens of its prompt: prompt tuning, as TensorRT-LLM has it.

A token id from the vocabulary's size on is a row of the table. The engine replaces it by token 0 and remembers its
position, so that nothing else meets an id outside the vocabulary. Standard library only.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.core.adapters import Matrix
from slipstream.core.errors import RequestError

TABLE, SIZE = "prompt_embedding_table", "prompt_vocab_size"
PLACEHOLDER = 0


@dataclass(frozen=True, slots=True)
class PromptRows:
    """positions: of the tokens, ascending; rows: of `table`, fp16, that each has."""

    table: Matrix
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def within(self, start: int, end: int) -> slice:
        """Which of them are positions from start to end - 1."""
        return slice(bisect_left(self.positions, start), bisect_left(self.positions, end))

    @property
    def prefix_key(self) -> bytes:
        """What sets keys and values behind these embeddings apart from those of others."""
        digest = hashlib.blake2b(self.table.data, digest_size=32, person=b"prompt table")
        digest.update(array("q", [self.table.shape[1], *self.positions, *self.rows]).tobytes())
        return b"\0table " + digest.digest()


def take_rows(
    token_ids: Sequence[int], table: Matrix, size: int, vocab_size: int, hidden_size: int
) -> tuple[list[int], PromptRows]:
    """Token ids of the vocabulary, and the rows that stood among them. size: of the table, as the client counts it, or
    0. Raises RequestError for a table of another width and for ids past its end."""
    num_rows, width = table.shape
    if width != hidden_size:
        raise RequestError(
            TABLE, f"got shape {[num_rows, width]}, accepted: [n, {hidden_size}], the model's hidden size"
        )
    if size > num_rows:
        raise RequestError(SIZE, f"got {size}, accepted: at most the {num_rows} rows of {TABLE}")
    end = vocab_size + (size or num_rows)
    if max(token_ids) >= end:
        accepted = f"0 to {vocab_size - 1}, and {vocab_size} to {end - 1} for the rows of {TABLE}"
        raise RequestError("input_ids", f"token id {max(token_ids)} is not in the vocabulary, accepted: {accepted}")
    positions = [position for position, token_id in enumerate(token_ids) if token_id >= vocab_size]
    if not positions:
        raise RequestError(TABLE, f"no token of the prompt is a row of it, accepted: input_ids from {vocab_size} on")
    found = PromptRows(table, positions, [token_ids[position] - vocab_size for position in positions])
    return [token_id if token_id < vocab_size else PLACEHOLDER for token_id in token_ids], found
