"""The tokens of penalised requests on the device: what is read of them, and how much memory that takes."""

from __future__ import annotations

import random

import pytest
import torch
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.step_inputs import new_request
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample import penalties
from slipstream.worker.sample.penalties import Paths, TokenHistory, history_bytes

CPU, WIDTH, MOST = torch.device("cpu"), 64, 6


def state_of(tokens: list[int]) -> RequestState:
    """A request that draws its first token."""
    state = RequestState(new_request(Request(tokens, SamplingParams(repetition_penalty=1.1))))
    state.num_drawn_tokens = 1
    return state


def rows_of(history: TokenHistory, requests: list[RequestState], paths: Paths | None) -> list[list[int]]:
    """The history of every row, put together from the pieces."""
    rows: list[list[int]] = []
    for piece, tokens, lengths in history.read(requests, None, paths):
        assert piece.start == len(rows) and tokens.dtype == torch.int32 and len(tokens) == len(lengths)
        rows += [row[:length].tolist() for row, length in zip(tokens, lengths)]
    return rows


@pytest.mark.parametrize("copy_bytes", [1, 2 * 4 * WIDTH, 1 << 20])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_pieces_are_the_tokens_whatever_their_size(
    copy_bytes: int, has_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join, grow, leave and come back; with drafts a request has a row for each of them."""
    monkeypatch.setattr(penalties, "COPY_BYTES", copy_bytes)
    dice, history = random.Random(copy_bytes), TokenHistory(MOST, WIDTH, CPU)
    pool = [state_of([dice.randrange(99) for _ in range(dice.randrange(1, 20))]) for _ in range(2 * MOST)]
    for _ in range(20):
        chosen = dice.sample(pool, dice.randrange(1, MOST + 1))
        drafts = [tuple(range(dice.randrange(4) if has_drafts else 0)) for _ in chosen]
        rows = [(one, path[:size]) for one, path in zip(chosen, drafts) for size in range(len(path) + 1)]
        paths = [path for _, path in rows] if has_drafts else None
        found = rows_of(history, [one for one, _ in rows], paths)
        assert found == [[*one.token_ids, *path] for one, path in rows]
        for one in chosen:
            num_new = min(dice.choice([1, 1, 3, 20]), WIDTH - 4 - one.num_tokens)
            one.token_ids += [dice.randrange(99) for _ in range(num_new)]
            one.num_drawn_tokens = one.num_output_tokens + 1


def test_a_long_history_is_not_copied_for_every_row_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 rows of drafts beside a request of 131,072 tokens were two copies of 256 MiB, which no plan had."""
    monkeypatch.setattr(penalties, "COPY_BYTES", 4 * 4 * WIDTH)
    history = TokenHistory(MOST, WIDTH, CPU)
    requests = [state_of([1] * (WIDTH - 4)), *(state_of([2]) for _ in range(MOST - 1))]
    paths = [(3, 4)] * MOST
    largest = max(tokens.nbytes for _, tokens, _ in history.read(requests, None, paths))
    table = MOST * WIDTH * 4
    assert history._table.nbytes == table
    assert table + 2 * largest <= history_bytes(MOST, WIDTH, MOST) == table + penalties.COPY_BYTES
    assert history_bytes(MOST, WIDTH, 1) == table + 2 * WIDTH * 4
    assert history_bytes(MOST, 10 * WIDTH, 99) == 10 * table + 2 * 10 * WIDTH * 4, "a single row is whole"
