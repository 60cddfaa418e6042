"""How many tokens of each request a drafter's cache holds, and which blocks hold them. Engine thread.

A block that the model's prefix cache shares may be empty in the drafter's cache: its first user did not speculate, or
its content came back from host memory. A reused block holds what the drafter computed for other tokens. So the drafter
notes for each block the hash of the content that it computed into it, the same hash that the prefix cache uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.worker.request_state import RequestState

LOST = -1


@dataclass(slots=True)
class _Followed:
    life: int  # the request's number of preemptions when it was followed
    end: int  # tokens seen, from the first on; LOST: there is a gap
    num_noted: int = 0  # blocks whose content is known to be this request's


class DraftKVState:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._contents: list[bytes | None] = [None] * num_blocks
        self._followed: dict[int, _Followed] = {}

    def seen(self, request: RequestState) -> int:
        """Tokens seen; of a request that is new here, those in blocks that others have filled with the same."""
        followed = self._of(request)
        return self._num_filled(request) * self._block_size if followed is None else followed.end

    def follow(self, request: RequestState, start: int, count: int) -> bool:
        """Take note that tokens start to start + count are being computed; False: there is a gap before them.

        A gap is for good: a drafter that cannot compute the tokens in it has lost the request.
        """
        if self.seen(request) < start:
            self.lose(request, start, count)
            return False
        followed = self._of(request)
        if followed is None:
            followed = self._followed[request.sequence_id] = _Followed(request.num_preemptions, 0)
        followed.end = start + count
        num_full = min(followed.end // self._block_size, len(request.block_hashes))  # the last may have no hash yet
        for place in range(followed.num_noted, num_full):
            self._contents[request.block_ids[place]] = request.block_hashes[place]
        followed.num_noted = max(followed.num_noted, num_full)
        self._forget_others(request, num_full)
        return True

    def lose(self, request: RequestState, start: int, count: int) -> None:
        """The model computed tokens that the drafter did not."""
        self._followed[request.sequence_id] = _Followed(request.num_preemptions, LOST)
        for block in request.block_ids[start // self._block_size : -(-(start + count) // self._block_size)]:
            self._contents[block] = None

    def forget(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._followed.pop(sequence_id, None)

    def _forget_others(self, request: RequestState, first: int) -> None:
        """What others left in the request's blocks from place `first` on, which are written in part, or by its drafts.

        Without this a block would go on as what its last user filled it with, though its first slots hold other keys.
        """
        for place in range(first, len(request.block_ids)):
            block, own = request.block_ids[place], request.block_hashes[place : place + 1]
            if [self._contents[block]] != own:
                self._contents[block] = None

    def _of(self, request: RequestState) -> _Followed | None:
        followed = self._followed.get(request.sequence_id)
        return followed if followed is not None and followed.life == request.num_preemptions else None

    def _num_filled(self, request: RequestState) -> int:
        """Leading blocks that hold this request's tokens here too. Without a prefix cache there are no hashes: none."""
        pairs = zip(request.block_ids, request.block_hashes)
        count = 0
        for block, content in pairs:
            if self._contents[block] != content:
                break
            count += 1
        return count
