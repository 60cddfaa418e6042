"""The state of a drafter's KV cache: number of valid tokens per request, content of each block. Engine thread.

A block that the model's prefix cache shares may be empty in the drafter's cache, if its first user did not speculate or
it was loaded back from host memory. A reused block holds keys and values of other tokens. So the drafter records for
each block the hash of the tokens that it computed there, the same hash that the prefix cache uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.worker.request_state import RequestState

LOST = -1


@dataclass(slots=True)
class _Recorded:
    num_preemptions: int  # the request's number of preemptions when it was recorded
    end: int  # tokens seen, from the first on; LOST: there is a gap
    num_recorded: int = 0  # blocks whose content is known to be this request's
    fed: Sequence[int] = ()  # drafts in the slots from `end` on


class DraftKVState:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._contents: list[bytes | None] = [None] * num_blocks
        self._recorded: dict[int, _Recorded] = {}

    def seen(self, request: RequestState) -> int:
        """Number of valid tokens; for a new request, the tokens of leading blocks that others filled alike."""
        recorded = self._of(request)
        return self._num_filled(request) * self._block_size if recorded is None else recorded.end

    def follow(self, request: RequestState) -> int:
        """`seen`, after drafts that were fed and have been accepted; they are recorded."""
        seen = end = self.seen(request)
        recorded = self._of(request)
        for token_id in recorded.fed if recorded is not None else ():
            if end >= request.num_tokens - 1 or request.token_ids[end] != token_id:
                break
            end += 1
        if end > seen:
            self.record(request, seen, end - seen)
        return end

    def feed(self, request: RequestState, token_ids: Sequence[int]) -> None:
        """Remember drafts that the drafter has computed behind the recorded tokens."""
        self._recorded[request.sequence_id].fed = token_ids

    def record(self, request: RequestState, start: int, count: int) -> bool:
        """Record that tokens start to start + count are being computed. Returns False if there is a gap before them.

        A gap is permanent: the drafter cannot compute its tokens, so the request is lost.
        """
        recorded, hashes = self._of(request), request.block_hashes
        if (self.seen(request) if recorded is None else recorded.end) < start:
            self.lose(request, start, count)
            return False
        if recorded is None:
            recorded = self._recorded[request.sequence_id] = _Recorded(request.num_preemptions, 0)
        recorded.end, recorded.fed = start + count, ()
        num_full = min(recorded.end // self._block_size, len(hashes))  # the last may have no hash yet
        if num_full > recorded.num_recorded:
            for index in range(recorded.num_recorded, num_full):
                self._contents[request.block_ids[index]] = hashes[index]
            recorded.num_recorded = num_full
        self._forget_others(request, num_full)
        return True

    def lose(self, request: RequestState, start: int, count: int) -> None:
        """The model computed tokens that the drafter did not."""
        self._recorded[request.sequence_id] = _Recorded(request.num_preemptions, LOST)
        for block in request.block_ids[start // self._block_size : -(-(start + count) // self._block_size)]:
            self._contents[block] = None

    def forget(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._recorded.pop(sequence_id, None)

    def _forget_others(self, request: RequestState, first: int) -> None:
        """Clear the recorded content of the request's blocks from `first` on, except its own.

        These blocks are partly written, by tokens or drafts; without this they would still count as an earlier user's.
        """
        contents, block_ids, hashes = self._contents, request.block_ids, request.block_hashes
        for block, own in zip(block_ids[first:], hashes[first:]):
            if contents[block] != own:
                contents[block] = None
        for block in block_ids[max(first, len(hashes)) :]:  # that have no hash yet
            contents[block] = None

    def _of(self, request: RequestState) -> _Recorded | None:
        recorded = self._recorded.get(request.sequence_id)
        return recorded if recorded is not None and recorded.num_preemptions == request.num_preemptions else None

    def _num_filled(self, request: RequestState) -> int:
        """Leading blocks that hold this request's tokens in the drafter's cache; 0 without a prefix cache."""
        pairs = zip(request.block_ids, request.block_hashes)
        count = 0
        for block, content in pairs:
            if self._contents[block] != content:
                break
            count += 1
        return count
