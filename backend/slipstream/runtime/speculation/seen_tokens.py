"""How far a drafter has followed each request, and which blocks hold what it computed. Engine thread.

A block that the model's prefix cache shares may hold nothing of the drafter's: its first user did not speculate. Such
marks are hints; a wrong one costs acceptance, never text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.core.request import Request

LOST = -1


@dataclass(slots=True)
class _Followed:
    life: int  # the request's number of preemptions when it was followed
    end: int  # tokens seen, from the first on; LOST: there is a gap


class SeenTokens:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._is_filled = np.zeros(num_blocks, dtype=bool)
        self._followed: dict[int, _Followed] = {}

    def seen(self, request: Request) -> int:
        """Tokens seen; of a request that is new here, those in blocks that others have filled."""
        followed = self._followed.get(request.request_id)
        if followed is None or followed.life != request.num_preemptions:
            return self._num_filled(request) * self._block_size
        return followed.end

    def follow(self, request: Request, start: int, count: int) -> bool:
        """Take note that tokens start to start + count are being computed; False: there is a gap before them.

        A gap is for good: who cannot compute what lies in it has lost the request.
        """
        if self.seen(request) < start:
            self.lose(request, start, count)
            return False
        self._followed[request.request_id] = _Followed(request.num_preemptions, start + count)
        blocks = request.block_ids[start // self._block_size : (start + count) // self._block_size]
        self._is_filled[blocks] = True
        return True

    def lose(self, request: Request, start: int, count: int) -> None:
        """The model computed tokens that the drafter did not."""
        self._followed[request.request_id] = _Followed(request.num_preemptions, LOST)
        blocks = request.block_ids[start // self._block_size : -(-(start + count) // self._block_size)]
        self._is_filled[blocks] = False

    def forget(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._followed.pop(request.request_id, None)

    def _num_filled(self, request: Request) -> int:
        """Leading blocks that are filled."""
        filled = self._is_filled[request.block_ids]
        return len(filled) if filled.all() else int(filled.argmin())
