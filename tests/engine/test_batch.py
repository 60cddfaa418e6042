"""The tensors of a step against a plain construction, over random mixes of prefill, chunks, decodes and drafts."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from slipstream.core.kv_groups import KVGroups
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step import ScheduledRequest, ScheduledStep
from slipstream.engine.step_inputs import StepInputs
from slipstream.nn.batch import MAX_DECODE_QUERY_LEN, ForwardBatch
from slipstream.worker.block_tables import TABLE_STEP, BlockTables, table_width
from slipstream.worker.input_batch import BatchBuilder, padding_batch
from slipstream.worker.interface import StepInput

CPU = torch.device("cpu")


def _plain(step: ScheduledStep, block_size: int) -> dict[str, list[int]]:
    fields: dict[str, list[int]] = {name: [] for name in ("token_ids", "positions", "slots", "last", "seq_lens")}
    starts = [0]
    for row in step.rows:
        tokens = row.request.token_ids + row.request.draft_token_ids
        for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens):
            fields["token_ids"].append(tokens[position])
            fields["positions"].append(position)
            block = row.request.block_ids[position // block_size]
            fields["slots"].append(block * block_size + position % block_size)
        starts.append(len(fields["positions"]))
        fields["seq_lens"].append(row.num_computed_tokens + row.num_scheduled_tokens)
        if row.samples:
            fields["last"].append(starts[-1] - 1)
    return {**fields, "starts": starts}


def _check(batch: ForwardBatch, step: ScheduledStep, block_size: int) -> None:
    expected = _plain(step, block_size)
    assert batch.token_ids.tolist() == expected["token_ids"]
    assert batch.positions.tolist() == expected["positions"]
    assert batch.slot_mapping.tolist() == expected["slots"]
    assert batch.query_start_loc.tolist() == expected["starts"]
    assert batch.seq_lens.tolist() == expected["seq_lens"]
    assert batch.logits_indices.tolist() == expected["last"]
    assert batch.max_seq_len == max(expected["seq_lens"])
    counts = step.num_scheduled_tokens
    decodes = list(itertools.takewhile(lambda count: count <= MAX_DECODE_QUERY_LEN, counts))
    assert batch.max_query_len == max(counts)
    assert (batch.num_decode_requests, batch.num_decode_tokens) == (len(decodes), sum(decodes))
    assert batch.max_decode_query_len == max([*decodes, 0])
    for request, table in zip(step.requests, batch.block_tables.tolist(), strict=True):
        num_blocks = len(request.block_ids)
        assert table[:num_blocks] == request.block_ids and set(table[num_blocks:]) <= {-1}
    dtypes = [t.dtype for t in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices)]
    assert set(dtypes) == {torch.int64}
    assert {batch.query_start_loc.dtype, batch.seq_lens.dtype, batch.block_tables.dtype} == {torch.int32}


@pytest.mark.parametrize("seed", range(6))
def test_batches_of_random_lives(seed: int) -> None:
    """Requests grow, are preempted (other blocks afterwards), leave and come, more of them than table rows."""
    dice = random.Random(seed)
    block_size = dice.choice([1, 4, 16])
    builder, inputs = BatchBuilder(block_size, BlockTables.sized(8, 200, block_size), CPU), StepInputs()
    pool = [_new_request(dice) for _ in range(12)]
    for _ in range(60):
        chosen = dice.sample(pool, dice.randrange(1, 9))
        step = ScheduledStep.of([_schedule(dice, request, block_size) for request in chosen])
        _check(_build(builder, inputs.build(0, step)), step, block_size)
        for row in step.rows:
            _live_on(dice, row)
        gone = [request for request in pool if dice.random() < 0.05]
        builder.tables.drop([request.sequence_id for request in gone])
        pool = [_new_request(dice) if request in gone else request for request in pool]


@pytest.mark.parametrize("seed", range(4))
def test_decodes_are_built_as_any_other_step(seed: int) -> None:
    """Requests decode on together, change places, leave, join and come back with other blocks."""
    dice = random.Random(seed)
    block_size = dice.choice([1, 4, 16])
    builder, inputs = BatchBuilder(block_size, BlockTables.sized(8, 400, block_size), CPU), StepInputs()
    pool, chosen = [_new_request(dice) for _ in range(10)], []
    for _ in range(100):
        if not chosen or dice.random() < 0.3:
            chosen = dice.sample(pool, dice.randrange(1, 9))
        for request in chosen:
            request.num_computed_tokens = request.num_tokens - 1
            while len(request.block_ids) * block_size < request.num_tokens:
                request.block_ids.append(dice.randrange(10_000))
        step = ScheduledStep.of([ScheduledRequest(one, one.num_computed_tokens, 1, True) for one in chosen])
        message = inputs.build(0, step)
        _check(_build(builder, message), step, block_size)
        arrays = builder.arrays(message)
        assert arrays.is_decode and builder.arrays(replace(message, samples=[False] * len(chosen))).is_decode is False
        for row in step.rows:
            _live_on(dice, row)


@pytest.mark.parametrize("seed", range(6))
def test_pending_tokens_are_found_where_the_step_before_has_drawn_them(seed: int) -> None:
    """Requests join, leave, wait for a step, and leave rows of the block tables to others."""
    dice, numbers = random.Random(seed), itertools.count(100)
    builder = BatchBuilder(4, BlockTables(4, 40), CPU)
    running: list[int] = []
    drawn: dict[int, int] = {}
    sampled = None
    for _ in range(150):
        gone = [one for one in running if dice.random() < 0.15]
        builder.tables.drop(gone)
        joining = [next(numbers) for _ in range(dice.randrange(3))]
        for one in joining:
            builder.tables.put(one, list(range(5)))
        running = [one for one in running if one not in gone]
        decoding = [one for one in running if dice.random() < 0.9]
        if dice.random() < 0.2:
            dice.shuffle(decoding)
        running += joining
        rows = [(one, 1) for one in decoding] + [(one, dice.randrange(1, 9)) for one in joining]
        if not rows:
            continue
        samples = [one in decoding or dice.random() < 0.7 for one, _ in rows]
        token_ids: list[int] = []
        pending: list[int] = []
        for index, (one, length) in enumerate(rows):
            pending += [index] * (one in decoding and one in drawn)
            token_ids += [0 if index in pending else 5000 + one] * length
        ids, lengths = [one for one, _ in rows], [length for _, length in rows]
        step = StepInput(0, ids, [3] * len(ids), lengths, [0] * len(ids), samples, token_ids, 0, pending)
        batch = builder.build(step, sampled)
        expected = [drawn.get(one, 5000 + one) if one in decoding else 5000 + one for one, n in rows for _ in range(n)]
        assert batch.token_ids.tolist() == expected
        drawing = [one for one, draws in zip(ids, samples) if draws]
        drawn = {one: dice.randrange(1000) for one in drawing}
        sampled = builder.sampled(step, torch.tensor(list(drawn.values()), dtype=torch.int64))
        assert sampled.sequence_ids == drawing


def test_a_token_of_a_step_before_the_last_is_refused() -> None:
    """Its row of the block tables is known from that step."""
    builder = BatchBuilder(4, BlockTables(4, 40), CPU)
    for one in (1, 2, 3):
        builder.tables.put(one, [one])
    for ids in ([1, 2, 3], [2, 3]):
        sampled = builder.sampled(_decodes(ids), torch.tensor(ids))
    assert builder.build(_decodes([3, 2], [0, 1]), sampled).token_ids.tolist() == [3, 2]
    with pytest.raises(AssertionError, match="another step"):
        builder.build(_decodes([1, 2], [0, 1]), sampled)
    with pytest.raises(AssertionError, match="another step"):
        builder.build(_decodes([1], [0]), builder.sampled(_decodes([]), torch.tensor([])))


def _decodes(ids: list[int], pending: list[int] | None = None) -> StepInput:
    count = len(ids)
    return StepInput(0, ids, [3] * count, [1] * count, [0] * count, [True] * count, [0] * count, 0, pending or [])


@pytest.mark.parametrize("groups", [KVGroups(), KVGroups(1, 1, 8, 8, (0, 1)), KVGroups(2, 0, 0, 0, (0, 1))], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_block_tables_hold_their_requests_blocks_and_nothing_else(seed: int, groups: KVGroups) -> None:
    """Against lists. Rows go from long requests to short ones, and a preempted request comes back with fewer blocks."""
    dice, tables, numbers = random.Random(seed), BlockTables(2, 24, groups), itertools.count()
    known: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(300):
        one = dice.choice([*known, next(numbers)])
        deed = dice.choice(["put", "extend", "drop"])
        new = [dice.randrange(999) for _ in range(groups.num_full * dice.randrange(0, 6))]
        windowed = [dice.randrange(999) for _ in range(groups.num_windowed * dice.randrange(0, 6))]
        if deed == "put":
            tables.put(one, new, windowed)
            known[one] = new, windowed
        elif deed == "drop":
            tables.drop([one])
            known.pop(one, None)
        elif one in known and max(map(len, known[one])) < 24 * groups.num_full // 2:
            tables.extend_all({one: new})
            tables.extend_windows(one, windowed)
            known[one] = known[one][0] + new, known[one][1] + windowed
        if not known:
            continue
        ids = dice.sample(list(known), len(known))
        widths = dice.choice([1, 4]), dice.randrange(3)
        first, others = tables.gather(ids, *widths), tables.gather_others(ids, *widths)
        found = [first] if others is None else [first, *others]
        longest = max(1, *(len(known[one][0]) // groups.num_full for one in ids))
        assert first.shape[1] >= min(24, longest + widths[1]) and first.shape[1] % widths[0] == 0
        for place, one in enumerate(ids):
            blocks = [known[one][0][group :: groups.num_full] for group in range(groups.num_full)]
            blocks += [known[one][1]] * groups.num_windowed
            for table, expected in zip(found, blocks, strict=True):
                row, width = table[place].tolist(), table.shape[1]
                assert row == (expected + [-1] * width)[:width]


def _build(builder: BatchBuilder, step: StepInput) -> ForwardBatch:
    """With what the step says of blocks."""
    for new in step.new_requests:
        builder.tables.put(new.sequence_id, new.block_ids)
    for sequence_id, block_ids in step.updates.block_ids.items():
        builder.tables.extend(sequence_id, block_ids)
    return builder.build(step)


def _new_request(dice: random.Random) -> Request:
    return Request([dice.randrange(1000) for _ in range(dice.randrange(1, 60))], SamplingParams())


def _schedule(dice: random.Random, request: Request, block_size: int) -> ScheduledRequest:
    missing = request.num_tokens - request.num_computed_tokens
    num_new = dice.randrange(1, missing + 1)
    if num_new == missing and dice.random() < 0.3:
        request.draft_token_ids = [dice.randrange(1000) for _ in range(dice.randrange(1, 5))]
        num_new += len(request.draft_token_ids)
    end = request.num_computed_tokens + num_new
    while len(request.block_ids) * block_size < end:
        request.block_ids.append(dice.randrange(10_000))
    return ScheduledRequest(request, request.num_computed_tokens, num_new, end >= request.num_tokens)


def _live_on(dice: random.Random, row: ScheduledRequest) -> None:
    request = row.request
    request.draft_token_ids = []
    request.num_computed_tokens = min(request.num_tokens, row.num_computed_tokens + row.num_scheduled_tokens)
    if row.samples:
        request.num_computed_tokens = request.num_tokens
        request.token_ids.append(dice.randrange(1000))
    if dice.random() < 0.1 or request.num_tokens > 150:
        request.block_ids, request.num_computed_tokens = [], 0
        request.num_preemptions, request.num_sent_blocks = request.num_preemptions + 1, -1
        del request.token_ids[60:]


def _num_lines(work: Callable[[], object]) -> int:
    """Lines of Python that run meanwhile."""
    count = 0

    def trace(frame: FrameType, event: str, value: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_blocks_beyond_a_row_are_refused_and_do_not_reach_the_next_request_s() -> None:
    tables = BlockTables(2, 4)
    tables.put(1, [1, 2, 3, 4])
    tables.put(2, [5, 6, 7, 8])
    held = tables.gather([1, 2])
    with pytest.raises(ValueError, match="room for 4 blocks, and is full"):
        tables.extend_all({1: [9]})
    with pytest.raises(ValueError, match="5 blocks, but a row has room for 4"):
        tables.put(1, [1, 2, 3, 4, 9])
    assert held.tolist() == tables.gather([1, 2]).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_decode_batch_takes_no_more_python_with_a_longer_context() -> None:
    """64 decodes at 2k context take under 0.5 ms on a quiet core: some lines a request, none a token or block."""
    lines = {}
    for length in (64, 2048):
        builder, inputs = BatchBuilder(64, BlockTables.sized(64, 4096, 64), CPU), StepInputs()
        requests = [Request([1] * length, SamplingParams()) for _ in range(64)]
        for index, request in enumerate(requests):
            request.block_ids = list(range(33 * index, 33 * index + length // 64 + 1))
        step = ScheduledStep.of([ScheduledRequest(request, length - 1, 1, True) for request in requests])
        _build(builder, inputs.build(0, step))  # rows of the block table are made once
        again = functools.partial(_build, builder)
        lines[length] = _num_lines(lambda inputs=inputs, step=step, again=again: again(inputs.build(1, step)))  # type: ignore[misc]
    assert lines[64] == lines[2048] < 64 * 30


@pytest.mark.parametrize("num_tokens", [1, MAX_DECODE_QUERY_LEN, MAX_DECODE_QUERY_LEN + 1])
def test_padding_writes_nothing(num_tokens: int) -> None:
    batch = padding_batch(num_tokens, 4, CPU)
    is_decode = num_tokens <= MAX_DECODE_QUERY_LEN
    assert batch.slot_mapping.tolist() == [-1] * num_tokens and batch.logits_indices.tolist() == [0]
    assert batch.block_tables.shape == (1, 4) and batch.query_start_loc.tolist() == [0, num_tokens]
    assert (batch.num_decode_requests, batch.num_decode_tokens) == ((1, num_tokens) if is_decode else (0, 0))
    assert batch.prompt_prefixes == (() if is_decode else (0,)), "an entry for each prompt"


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_tables_have_room_for_the_longest_sequence_and_the_token_after_it(block_size: int) -> None:
    for max_model_len in (1, 15, 16, 17, 127, 128, 1023, 1024, 1025):
        needed, width = -(-(max_model_len + 1) // block_size), table_width(max_model_len, block_size)
        assert needed <= width < needed + TABLE_STEP and width % TABLE_STEP == 0
