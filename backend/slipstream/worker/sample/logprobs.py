"""Log-probabilities of sampled and of prompt tokens, from the model's own logits (before any edit). Engine thread.

Prompt log-probabilities arrive chunk by chunk as the prompt is computed, and again after a preemption: they are kept by
position until the request's first token leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from slipstream_kernels import ops

from slipstream.core.outputs import TokenLogprobs
from slipstream.worker.interface import StepInput
from slipstream.worker.request_state import RequestState

# rows of prompt logits held at once: 256 x 128k vocabulary x 4 bytes = 128 MiB
MAX_PROMPT_ROWS = 256

# Numbers of likeliest tokens that are looked for: a kernel is compiled for each, so requests get the next one. Above
# the last it is torch.topk.
_WIDTHS = 0, 1, 5, 20, 50, 128

LogitsOf = Callable[[torch.Tensor], torch.Tensor]  # hidden rows [R, H] -> logits [R, V]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """Log-softmax of each row at its token, the token's rank, and the row's num_top most likely tokens.

    logits: [R, V] fp32; token_ids: [R] int64 on the same device.
    """
    columns = logprob_columns(logits, token_ids, max(num_top))
    return read_columns(num_top, [column.tolist() for column in columns])


def logprob_columns(
    logits: torch.Tensor, token_ids: torch.Tensor, max_top: int, asked: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Columns for `read_columns`: token ids, logprobs, ranks, the ids and logprobs of the most probable tokens, and the
    logprobs of the tokens asked for ([R, N] int64)."""
    found = ops.top_logprobs(logits, _width_of(max_top, logits.shape[1]), token_ids)
    columns = (token_ids, found.chosen, found.rank, found.token_ids, found.values)
    if asked is None:
        return columns
    log_normaliser = logits.gather(1, token_ids[:, None]) - found.chosen[:, None]
    return (*columns, logits.gather(1, asked) - log_normaliser)


def warm_up_logprobs(logits: torch.Tensor, most: int) -> None:
    """Compile what up to `most` likeliest tokens take; -1: all. logits: [1, V] fp32."""
    vocab_size = logits.shape[1]
    most = vocab_size if most < 0 else most
    for width in sorted({_width_of(min(asked, most), vocab_size) for asked in _WIDTHS}):
        ops.top_logprobs(logits, width, torch.zeros(1, dtype=torch.int64, device=logits.device))


def _width_of(max_top: int, vocab_size: int) -> int:
    return min(next((width for width in _WIDTHS if width >= max_top), max_top), vocab_size)


def read_columns(
    num_top: list[int], columns: Sequence[list[Any]], asked: Sequence[Sequence[int]] = ()
) -> list[TokenLogprobs]:
    """asked: the token ids of each row that the last column, if it is there, is about; a row's may be fewer."""
    entries = [
        TokenLogprobs(token_id, logprob, rank, list(zip(top_ids[:count], top_values[:count])))
        for count, token_id, logprob, rank, top_ids, top_values in zip(num_top, *columns[:5])
    ]
    for entry, asked_ids, values in zip(entries, asked, *columns[5:]):
        entry.asked = list(zip(asked_ids, values))
    return entries


def row_bytes(logits: torch.Tensor) -> list[bytes]:
    """Each row as fp32; waits for the device."""
    return [row.tobytes() for row in logits.float().cpu().numpy()]


@dataclass(frozen=True)
class TakenPrompts:
    """By sequence id, of requests whose prompts are whole. logits: rows of row_bytes."""

    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    logits: dict[int, list[bytes]] = field(default_factory=dict)


NO_PROMPTS = TakenPrompts()


@dataclass(slots=True)
class _PromptRows:
    """Rows of the step's hidden states that predict prompt tokens of one request."""

    request: RequestState
    first_row: int
    first_position: int
    num_rows: int


class PromptLogprobs:
    """Collects prompt log-probabilities of the requests that asked for them."""

    def __init__(self) -> None:
        self._entries: dict[int, list[TokenLogprobs | None]] = {}
        self._logits: dict[int, list[bytes]] = {}  # of requests that want all logits

    def collect(
        self, step: StepInput, states: Sequence[RequestState], hidden: torch.Tensor, logits_of: LogitsOf
    ) -> None:
        """Add the entries of this step's prompt rows. hidden: [T, H], rows in the order of the step."""
        first_row = 0
        for state, start, count in zip(states, step.num_computed_tokens, step.num_scheduled_tokens):
            if state.params.prompt_logprobs is not None and state.num_output_tokens == 0:
                is_last_read = state.params.return_context_logits  # its row predicts no prompt token
                end = min(start + count, state.num_prompt_tokens - (not is_last_read))
                if end > start:
                    self._collect_rows(_PromptRows(state, first_row, start, end - start), hidden, logits_of)
            first_row += count

    def take(self, step: StepInput, states: Sequence[RequestState]) -> TakenPrompts:
        """Those of requests that sample their first token in this step; removed here."""
        taken = TakenPrompts()
        for index, state in enumerate(states):
            if state.params.prompt_logprobs is None or not step.samples[index]:
                continue
            end = step.num_computed_tokens[index] + step.num_scheduled_tokens[index] - step.num_drafts[index]
            if end == state.num_prompt_tokens:
                entries = self._entries.pop(state.sequence_id, None)
                taken.logprobs[state.sequence_id] = entries or [None]  # a prompt of one token has no predicted token
                if (rows := self._logits.pop(state.sequence_id, None)) is not None:
                    taken.logits[state.sequence_id] = rows
        return taken

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._entries.pop(sequence_id, None)
            self._logits.pop(sequence_id, None)

    def _collect_rows(self, rows: _PromptRows, hidden: torch.Tensor, logits_of: LogitsOf) -> None:
        request = rows.request
        entries = self._entries.setdefault(request.sequence_id, [None] * request.num_prompt_tokens)
        num_top = request.params.prompt_logprobs or 0
        for start in range(0, rows.num_rows, MAX_PROMPT_ROWS):
            count = min(MAX_PROMPT_ROWS, rows.num_rows - start)
            row, target = rows.first_row + start, rows.first_position + start + 1
            logits = logits_of(hidden[row : row + count])
            if request.params.return_context_logits:
                kept = self._logits.setdefault(request.sequence_id, [b""] * request.num_prompt_tokens)
                kept[target - 1 : target - 1 + count] = row_bytes(logits)
                count = min(count, request.num_prompt_tokens - target)
            if count:
                targets = torch.tensor(request.token_ids[target : target + count], device=logits.device)
                entries[target : target + count] = token_logprobs(logits[:count], targets, [num_top] * count)
