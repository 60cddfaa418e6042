"""Which blocks hold what a drafter made of a request's tokens, when blocks pass from one request to another."""

from __future__ import annotations

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.step_inputs import new_request
from slipstream.worker.request_state import RequestState
from slipstream.worker.spec_decode.draft_kv_state import DraftKVState

BLOCK_SIZE = 4


def held(blocks: list[int], *hashes: bytes) -> RequestState:
    return RequestState(new_request(Request([1], SamplingParams(), block_ids=blocks, block_hashes=list(hashes))))


def record(seen: DraftKVState, request: RequestState, count: int) -> None:
    assert seen.record(request, 0, count)
    seen.forget([request.sequence_id])


def test_a_full_block_is_known_by_its_content() -> None:
    seen = DraftKVState(4, BLOCK_SIZE)
    record(seen, held([0, 1], b"x", b"y"), 2 * BLOCK_SIZE)
    assert seen.seen(held([0, 1, 2], b"x", b"y", b"z")) == 2 * BLOCK_SIZE
    assert seen.seen(held([0, 1], b"x", b"other")) == BLOCK_SIZE


def test_a_block_written_in_part_is_no_longer_what_it_was() -> None:
    seen = DraftKVState(4, BLOCK_SIZE)
    record(seen, held([0], b"x"), BLOCK_SIZE)
    record(seen, held([0]), 2)
    assert seen.seen(held([0], b"x")) == 0


def test_a_block_for_drafts_is_no_longer_what_it_was() -> None:
    """Drafts are fed behind the last token, maybe in a block of which no token is followed yet."""
    seen = DraftKVState(4, BLOCK_SIZE)
    record(seen, held([0, 1], b"x", b"y"), 2 * BLOCK_SIZE)
    record(seen, held([2, 1], b"z"), BLOCK_SIZE)
    assert seen.seen(held([0, 1], b"x", b"y")) == BLOCK_SIZE


def test_a_block_shared_with_others_stays_what_it_is() -> None:
    """If a prompt's last block is in the prefix cache, only a token may be computed again."""
    seen = DraftKVState(4, BLOCK_SIZE)
    record(seen, held([0, 1], b"x", b"y"), 2 * BLOCK_SIZE)
    record(seen, held([0, 1, 2], b"x", b"y"), 2 * BLOCK_SIZE - 1)
    assert seen.seen(held([0, 1], b"x", b"y")) == 2 * BLOCK_SIZE


def test_drafts_that_were_fed_count_once_they_are_accepted_until_the_blocks_are_lost() -> None:
    """Preempted, it comes back with the first block from the prefix cache, and another second one."""
    seen, hashes = DraftKVState(4, BLOCK_SIZE), [b"x"]
    request = Request([1, 2, 3, 4], SamplingParams(), block_ids=[0, 1], block_hashes=hashes)
    state = RequestState(new_request(request))
    assert seen.record(state, 0, BLOCK_SIZE)
    seen.feed(state, [5, 6, 7])
    assert seen.follow(state) == BLOCK_SIZE, "none is accepted yet"
    request.token_ids += [5, 6, 8]
    request.block_ids, request.num_preemptions = [0, 2], 1
    assert seen.follow(RequestState(new_request(request))) == BLOCK_SIZE
    state.token_ids += [5, 6, 8]
    assert seen.follow(state) == BLOCK_SIZE + 2
    state.token_ids += [9]
    assert seen.follow(state) == BLOCK_SIZE + 2, "they count once"
