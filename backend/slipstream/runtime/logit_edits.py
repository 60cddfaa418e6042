"""What changes logits before a token is drawn: biases, bans, penalties. Engine thread.

Each edit names its rows, so that a step pays only for requests that asked. Everything is per row and depends on that
row's request alone: never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from slipstream_kernels import ops

from slipstream.core.request import Request

# Finite, unlike a guide's -inf: where a guide leaves nothing but banned tokens (the text must end, min_tokens says not
# yet), the guide wins and there still is something to draw.
BANNED = -1e30


class SparseEdits:
    """Values to be added at (row, token) places of a step's logits."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], float] = {}

    def add(self, row: int, token_ids: Iterable[int], value: float) -> None:
        for token_id in token_ids:
            place = (row, token_id)
            self._values[place] = self._values.get(place, 0.0) + value

    def apply(self, logits: torch.Tensor) -> None:
        """Add in place. logits: [num_rows, vocab] fp32."""
        if not self._values:
            return
        device = logits.device
        places = torch.tensor(list(self._values)).T.contiguous().to(device, non_blocking=True)
        values = torch.tensor(list(self._values.values()), dtype=torch.float32).to(device, non_blocking=True)
        ops.apply_bias(logits, places[0], places[1], values)


def has_sparse_edits(request: Request) -> bool:
    """Whether `add_edits` may ever have something to add for this request."""
    params = request.params
    return bool(params.logit_bias or params.bad_words_ids or params.min_tokens)


def add_edits(edits: SparseEdits, row: int, request: Request) -> None:
    """Collect the biases and bans of one request for its token under way.

    A bad word of several tokens bans its last token where the text ends with the others. While fewer than min_tokens
    are there, whatever token would stop the request is banned.
    """
    params = request.params
    for token_id, bias in params.logit_bias:
        edits.add(row, (token_id,), bias)
    for word in params.bad_words_ids:
        if _ends_with(request, word[:-1]):
            edits.add(row, (word[-1],), BANNED)
    if request.num_drawn_tokens <= params.min_tokens and request.stop_conditions is not None:
        edits.add(row, request.stop_conditions.token_ids, BANNED)


def _ends_with(request: Request, token_ids: tuple[int, ...]) -> bool:
    if not token_ids:
        return True
    if request.num_output_tokens < len(token_ids):
        return False
    return tuple(request.token_ids[-len(token_ids) :]) == token_ids
