"""Prompt tables of requests: checked, turned into rows, and held to a bound of host memory. Any thread."""

from __future__ import annotations

import torch

from slipstream.core.adapters import Matrix
from slipstream.core.byte_budget import ByteBudget
from slipstream.core.errors import CapacityError, RequestError
from slipstream.core.prompt_table import TABLE, take_rows
from slipstream.core.request import Request


class PromptTables:
    """Makes rows of tables. has_adapters: the model serves LoRA adapters, whose steps take no tables."""

    def __init__(self, vocab_size: int, hidden_size: int, has_adapters: bool) -> None:
        self._sizes = vocab_size, hidden_size
        self._has_adapters = has_adapters

    def resolve(self, request: Request) -> None:
        """Replace the ids of a request that stand for rows of its table. Raises RequestError."""
        table, request.prompt_table = request.prompt_table, None
        if table is None or not table.data:
            return
        params = request.params
        if self._has_adapters:
            raise RequestError(TABLE, "accepted by models without enable_lora")
        if params.beam_width > 1 or params.prompt_logprobs is not None:
            raise RequestError(TABLE, "accepted without beam search and without prompt_logprobs")
        token_ids, rows = take_rows(request.prompt_token_ids, table, request.prompt_table_size, *self._sizes)
        if not _is_finite(table):
            raise RequestError(TABLE, "has infinities or NaN, accepted: finite numbers")
        request.prompt_token_ids, request.token_ids = token_ids, list(token_ids)
        request.prompt_rows = rows
        request.prefix_key += rows.prefix_key


class TableBudget(ByteBudget):
    """How many bytes of tables the requests that are not answered may hold together."""

    def take(self, request: Request) -> None:
        """Raises RequestError for more than there is, CapacityError for more than is left."""
        num_bytes = len(request.prompt_table.data) if request.prompt_table is not None else 0
        if not num_bytes:
            return
        if num_bytes > self._limit:
            raise RequestError(TABLE, f"has {num_bytes} bytes, accepted: at most max_prompt_table_bytes={self._limit}")
        if (others := self._hold(request.handle, num_bytes)) is not None:
            told = f"{num_bytes} bytes of {TABLE} beside {others.num_bytes} of other requests"
            raise CapacityError(f"{told}; max_prompt_table_bytes={self._limit}")


def _is_finite(table: Matrix) -> bool:
    return bool(torch.frombuffer(bytearray(table.data), dtype=torch.float16).isfinite().all())
