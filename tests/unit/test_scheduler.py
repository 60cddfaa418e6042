"""core/scheduler.py: one test per promise about steps. Ends are in test_scheduler_ends.py, the random walk over all
promises together in test_scheduler_model.py."""

from __future__ import annotations

import pytest
from fake_llm import SIZE, FakeLLM, continuation, make_llm, make_request
from slipstream.core import scheduler
from slipstream.core.block_pool import BlockPool
from slipstream.core.errors import CapacityError, ConfigError, RequestError
from slipstream.core.request import FinishReason, Request, RequestStatus


def add(llm: FakeLLM, *requests: Request) -> None:
    for request in requests:
        llm.scheduler.add(request)


def rows(llm: FakeLLM) -> list[tuple[Request, int, int, bool]]:
    """The last step's rows: (request, num_computed_tokens, num_scheduled_tokens, samples)."""
    return [(row.request, row.num_computed_tokens, row.num_scheduled_tokens, row.samples) for row in llm.steps[-1].rows]


# ---- the token budget


def test_prefill_and_decode_share_a_step() -> None:
    llm = make_llm(max_num_batched_tokens=16)
    first, second = make_request(5), make_request(6)
    add(llm, first)
    llm.step()
    add(llm, second)
    llm.step()
    assert rows(llm) == [(first, 5, 1, True), (second, 0, 6, True)]
    assert llm.steps[-1].total_num_scheduled_tokens == 7


def test_a_long_prompt_is_chunked_after_the_decodes() -> None:
    llm = make_llm(max_num_batched_tokens=8)
    short, long = make_request(3, 20), make_request(19, 20)
    add(llm, short, long)
    llm.step()
    assert rows(llm) == [(short, 0, 3, True), (long, 0, 5, False)]
    llm.step()
    assert rows(llm) == [(short, 3, 1, True), (long, 5, 7, False)]
    llm.step()
    assert rows(llm) == [(short, 4, 1, True), (long, 12, 7, True)]
    llm.step()
    assert rows(llm) == [(short, 5, 1, True), (long, 19, 1, True)]


def test_a_prompt_that_would_fit_alone_begins_beside_decodes() -> None:
    llm = make_llm(max_num_batched_tokens=16)
    add(llm, make_request([1] * 3), make_request([2] * 4))
    llm.step()
    add(llm, make_request(list(range(16))))
    llm.step()
    assert llm.steps[-1].num_scheduled_tokens == [1, 1, 14]


def test_a_prompt_that_ends_on_the_chunk_border_samples_at_once() -> None:
    llm = make_llm(max_num_batched_tokens=8)
    request = make_request(16)
    add(llm, request)
    assert llm.step() == []
    assert [output.new_token_ids for output in llm.step()] == [continuation([16] * 16, 1)]


def test_an_urgent_request_overtakes_a_prefill_that_has_begun_but_an_equal_one_does_not() -> None:
    llm = make_llm(max_num_batched_tokens=4)
    add(llm, long := make_request(30, 4))
    llm.step()
    add(llm, equal := make_request(2, 20), urgent := make_request(1, 20, priority=-1))
    llm.step()
    assert rows(llm) == [(urgent, 0, 1, True), (long, 4, 3, False)]
    llm.step()
    assert rows(llm) == [(urgent, 1, 1, True), (long, 7, 3, False)]
    llm.run()
    assert long.times.first_token_ns < equal.times.first_token_ns


def test_the_number_of_running_requests_is_limited() -> None:
    llm = make_llm(max_num_seqs=2)
    requests = [make_request(3 + index, 4) for index in range(5)]
    add(llm, *requests)
    while llm.scheduler.has_work:
        llm.step()
        assert llm.scheduler.num_running <= 2 and len(llm.steps[-1].requests) <= 2
    assert all(request.is_finished for request in requests)


def test_more_seats_than_tokens_still_lets_a_prefill_end() -> None:
    llm = make_llm(max_num_seqs=8, max_num_batched_tokens=4)
    add(llm, *(make_request(1, 40) for _ in range(3)), make_request(30, 2))
    llm.run()
    assert max(step.total_num_scheduled_tokens for step in llm.steps) <= 4


# ---- whole prompts only


def test_without_chunked_prefill_prompts_are_whole() -> None:
    llm = make_llm(max_num_batched_tokens=10, enable_chunked_prefill=False)
    add(llm, make_request(6), make_request(7), make_request(3))
    llm.run()
    assert all(row.samples for step in llm.steps for row in step.rows)


def test_without_chunked_prefill_decodes_make_room_for_a_prompt_every_other_step() -> None:
    llm = make_llm(max_num_batched_tokens=10, enable_chunked_prefill=False, caching=False)
    decodes = [make_request(1, 30) for _ in range(3)]
    add(llm, *decodes)
    llm.step()
    wholes = [make_request(10, 3) for _ in range(3)]
    add(llm, *wholes)
    for _ in range(6):
        llm.step()
    assert all(request.num_output_tokens > 0 for request in wholes), "whole prompts were starved"
    assert all(request.num_output_tokens >= 4 for request in decodes), "decodes were starved"


def test_without_chunked_prefill_a_resume_longer_than_a_step_still_runs() -> None:
    llm = make_llm(num_blocks=6, max_num_batched_tokens=8, enable_chunked_prefill=False, caching=False)
    first, second = make_request([1] * 8, 16), make_request([2] * 8, 16)
    add(llm, first, second)
    llm.run()
    assert second.num_preemptions > 0
    assert second.output_token_ids == continuation([2] * 8, 16)


# ---- blocks


def test_preemption_takes_the_last_arrived_of_the_lowest_priority_and_keeps_its_tokens() -> None:
    llm = make_llm(num_blocks=9, caching=False)
    urgent = make_request([1] * 8, 12, priority=-1)
    normal = make_request([2] * 8, 12)
    lowest = make_request([3] * 8, 12, priority=5)
    add(llm, lowest, normal, urgent)
    llm.run()
    preempted = [request for step in llm.steps for request in step.preempted]
    assert preempted and preempted[0] is lowest and urgent not in preempted
    assert lowest.num_preemptions == preempted.count(lowest)
    for request, token in ((urgent, 1), (normal, 2), (lowest, 3)):
        assert request.output_token_ids == continuation([token] * 8, 12) == llm.emitted[request.sequence_id]


def test_requests_that_wait_for_a_long_prefix_cost_the_same_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients ask about a document that is being computed: nobody counts again how much of it is there."""
    limits = {"max_num_batched_tokens": 64, "max_mixed_prefill_tokens": 16}
    llm, document = make_llm(num_blocks=512, max_model_len=1024, **limits), list(range(800))
    add(llm, make_request(3, 100))  # beside it a step has room for more prompts than it takes
    llm.step()
    requests = [make_request([*document, place, *range(2 * SIZE)]) for place in range(30)]  # whose ends differ
    add(llm, *requests)
    llm.step()
    num_found, find = [0], BlockPool.find

    def count(pool: BlockPool, block_hash: bytes) -> int | None:
        num_found[0] += 1
        return find(pool, block_hash)

    monkeypatch.setattr(BlockPool, "find", count)
    llm.step()
    num_found[0] = 0
    for _ in range(40):
        llm.step()
        assert llm.scheduler.num_waiting == len(requests) - 1 and num_found[0] == 0
    llm.run()
    assert [request.num_cached_tokens for request in requests] == [0] + [800] * 29


def test_decodes_do_not_wait_for_a_crowd_that_starts_in_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shared block takes the engine's thread some time, however few tokens are left to compute."""
    monkeypatch.setattr(scheduler, "_MAX_FOUND", 8192)
    llm, document = make_llm(num_blocks=1024, max_model_len=1024), list(range(800))
    add(llm, make_request(document, 4))
    llm.run()
    crowd = [make_request([*document, place]) for place in range(90)]
    add(llm, *crowd)
    llm.step()
    assert llm.scheduler.num_running == 90  # nobody decodes
    llm.run()
    add(llm, make_request(3, 100))
    llm.step()
    add(llm, *(make_request([*document, place]) for place in range(100, 190)))
    num_started = [1]
    while llm.scheduler.num_waiting:
        llm.step()
        num_started.append(llm.scheduler.num_running)
    assert num_started == [1, 42, 83, 91]  # 41 times 200 blocks


def test_a_preempted_request_resumes_from_its_cached_prefix() -> None:
    llm = make_llm(num_blocks=8)
    first, second = make_request([1] * 8, 14), make_request([2] * 8, 14)
    add(llm, first, second)
    while second.status is not RequestStatus.PREEMPTED:
        llm.step()
    num_tokens = second.num_tokens
    while second.status is RequestStatus.PREEMPTED:
        llm.step()
    resumed = next(row for row in llm.steps[-1].rows if row.request is second)
    assert 0 < resumed.num_computed_tokens < num_tokens
    assert second.num_cached_tokens == 0, "only the first admission counts as a prompt hit"
    llm.run()
    assert second.output_token_ids == continuation([2] * 8, 14)


def test_guaranteed_no_evict_admits_only_what_it_can_finish() -> None:
    llm = make_llm(num_blocks=9, policy="guaranteed_no_evict", caching=False)
    requests = [make_request([token] * 8, 8) for token in (1, 2, 3)]  # four blocks each
    add(llm, *requests)
    llm.step()
    assert (llm.scheduler.num_running, llm.scheduler.num_waiting) == (2, 1)
    llm.run()
    assert not any(step.preempted for step in llm.steps)


def test_guaranteed_no_evict_counts_a_shared_prefix_once() -> None:
    llm = make_llm(num_blocks=8, policy="guaranteed_no_evict")
    prefix = list(range(16))
    requests = [make_request([*prefix, token], 3) for token in (30, 31, 32, 33)]  # 5 blocks each, 4 of them shared
    add(llm, *requests)
    llm.step()
    llm.step()
    assert llm.scheduler.num_running == 4 and llm.scheduler.cache.num_used_blocks == 8
    llm.run()
    assert not any(step.preempted for step in llm.steps)


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    llm = make_llm(num_blocks=10, caching=False)
    running, big, small = make_request(20, 8), make_request(30, 2), make_request(2, 2)
    add(llm, running)
    llm.step()
    add(llm, big, small)
    llm.step()
    assert llm.scheduler.num_running == 1
    llm.run()
    assert llm.scheduler.cache.num_used_blocks == 0


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    llm = make_llm()
    prompt = list(range(13))
    siblings = [make_request(prompt, 4) for _ in range(4)]
    llm.scheduler.add_all(siblings)
    llm.run()
    assert [request.num_cached_tokens for request in siblings] == [0, 12, 12, 12]
    assert sum(step.total_num_scheduled_tokens for step in llm.steps) == 13 + 3 + 4 * 3
    assert all(request.output_token_ids == continuation(prompt, 4) for request in siblings)


def test_a_cancelled_leader_does_not_hold_its_followers() -> None:
    llm = make_llm(max_num_batched_tokens=4)
    leader, follower = make_request(list(range(20)), 4), make_request(list(range(20)), 4)
    add(llm, leader, follower)
    llm.step()
    assert follower.status is RequestStatus.WAITING
    llm.scheduler.finish(leader, FinishReason.CANCELLED)
    llm.run()
    assert follower.output_token_ids == continuation(list(range(20)), 4)


# ---- the order


def test_waiting_requests_go_by_priority_then_arrival() -> None:
    llm = make_llm(max_num_seqs=1)
    requests = [make_request(3 + index, 1, priority) for index, priority in enumerate([1, 0, 1, -2, 0])]
    add(llm, *requests)
    llm.run()
    order = [requests.index(step.requests[0]) for step in llm.steps]
    assert order == [3, 1, 4, 0, 2]


# ---- the door


def test_full_means_capacity_error_and_a_group_comes_whole_or_not_at_all() -> None:
    llm = make_llm(max_num_seqs=1, max_waiting_requests=2)
    add(llm, make_request(3), make_request(4))
    with pytest.raises(CapacityError, match="max_waiting_requests=2"):
        llm.scheduler.add_all([make_request(5), make_request(6)])
    assert llm.scheduler.num_waiting == 2
    for num_arriving in (0, 1):
        with pytest.raises(RequestError, match="n: got 4, accepted: at most 3"):
            llm.scheduler.check_capacity(4, num_arriving)  # however little runs
    add(llm, make_request(7))
    with pytest.raises(CapacityError):
        llm.scheduler.check_capacity(0, 1)
    with pytest.raises(CapacityError):
        add(llm, make_request(8))
    llm.step()
    with pytest.raises(CapacityError):
        add(llm, make_request(8))
    llm.run()
    add(llm, make_request(8))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "config", "field", "text"),
    [
        ([], 4, {}, "prompt", "no tokens"),
        (100, 4, {}, "prompt", "has 100 tokens, accepted: at most 99"),
        (20, 200, {"num_blocks": 10}, "max_tokens", "got 200 .* 20 tokens: 99 tokens, .* 25 KV blocks of 4, .* 10"),
        (20, 200, {"num_blocks": 10}, "max_tokens", "there are 10; accepted: at most 21$"),
        (39, 9, {"num_blocks": 10}, "max_tokens", "there are 10; accepted: at most 2$"),
        (41, 1, {"num_blocks": 10}, "max_tokens", "there are 10; shorten the prompt$"),
        (
            20,
            30,
            {"max_num_batched_tokens": 16, "enable_chunked_prefill": False},
            "prompt",
            "max_num_batched_tokens=16",
        ),
    ],
)
def test_what_can_never_fit_is_refused_with_the_limit(
    prompt: list[int] | int, max_tokens: int, config: dict[str, object], field: str, text: str
) -> None:
    llm = make_llm(max_model_len=100, **config)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=text) as error:
        add(llm, make_request(prompt, max_tokens))
    assert error.value.field == field and not llm.scheduler.has_work


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "config", "params"),
    [
        (99, 1, {}, {}),
        (40, 1, {"num_blocks": 10}, {}),  # the last token takes no slot
        (20, 21, {"num_blocks": 10}, {}),
        (20, 21, {"num_blocks": 10, "policy": "guaranteed_no_evict"}, {}),
        (16, 1, {"max_num_batched_tokens": 16, "enable_chunked_prefill": False}, {}),
        (16, 1, {"max_beam_width": 3}, {"beam_width": 3}),
    ],
)
def test_what_just_fits_is_taken(
    prompt: int, max_tokens: int, config: dict[str, object], params: dict[str, object]
) -> None:
    llm = make_llm(max_model_len=100, **config)  # type: ignore[arg-type]
    add(llm, request := make_request(prompt, max_tokens, **params))
    llm.run()
    assert request.num_output_tokens == max_tokens


def test_an_unknown_policy_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="guaranteed_no_evict"):
        make_llm(policy="best")


# ---- speculation's seam


def test_drafts_never_take_the_prefills_tokens_nor_go_past_the_end() -> None:
    llm = make_llm(max_num_batched_tokens=12)
    llm.num_drafts = llm.num_right = 9
    decode, prefill = make_request(3, 40), make_request(30, 4)
    add(llm, decode)
    llm.step()
    add(llm, prefill)
    llm.step()
    assert rows(llm) == [(decode, 3, 6, True), (prefill, 0, 6, False)]
    llm.run()
    assert decode.output_token_ids == continuation([3] * 3, 40)
    assert decode.num_accepted_tokens == decode.num_drafted_tokens > 20
    assert len(llm.steps) < 20


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    llm = make_llm(num_blocks=5, caching=False)
    llm.num_drafts = llm.num_right = 6
    first, second = make_request([1] * 7, 4), make_request([2] * 7, 4)
    add(llm, first, second)
    llm.step()
    llm.step()  # two drafts reach into a third block, and there is one such block
    assert rows(llm) == [(first, 7, 3, True), (second, 7, 1, True)]
    llm.run()
    assert first.num_preemptions == second.num_preemptions == 0
    assert second.output_token_ids == continuation([2] * 7, 4)


def test_drafts_of_a_preempted_request_stay_until_their_step_is_committed() -> None:
    """With stages, a request may lose its blocks to another step while a step in flight verifies its drafts."""
    llm = make_llm(num_blocks=5, caching=False)
    llm.scheduler.num_microbatches, llm.num_ahead = 2, 1
    first, second = make_request([1] * 7, 6), make_request([2] * 7, 6)
    add(llm, first, second)
    llm.step()
    llm.scheduler.commit(*llm.flights.pop())
    second.draft_token_ids = continuation(second.token_ids, 2)
    for expected in ((first, 7, 1, True), (second, 7, 3, True), (first, 8, 1, True)):
        llm.step()
        assert rows(llm) == [expected]
    assert second.num_preemptions == 1 and second.num_accepted_tokens == 2 and not second.draft_token_ids
    llm.run()
    assert second.output_token_ids == continuation([2] * 7, 6)
