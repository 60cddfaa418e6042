"""How latent attention shares out its keys: every tile once, and parts that know of each other.  On a CPU."""

from __future__ import annotations

import random

import emulation
import numpy as np
import pytest
import torch
from slipstream_kernels.attention.cuda.latent_attention import LatentParams, Schedule

pytestmark = pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
ROWS, KEYS, MAX_WORKS = 16, 64, 2048  # of emulate_latent_walk.cc
FIELDS = ("request", "start", "query_len", "seq_len", "first_row", "begin", "end", "num_parts", "slot", "first_slot")


def works_of(query_lens: list[int], seq_lens: list[int], num_heads: int, schedule: Schedule) -> list[list[dict]]:
    """What each CTA does, in its order."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths = torch.tensor(seq_lens).int()
    num_ctas = schedule.num_shares * schedule.num_lanes
    found = np.zeros((num_ctas, MAX_WORKS, len(FIELDS)), dtype=np.int32)
    params = LatentParams(
        out=found.ctypes.data, query_start_loc=starts.data_ptr(), seq_lens=lengths.data_ptr(),
        num_requests=len(query_lens), num_heads=num_heads, num_shares=schedule.num_shares, num_lanes=schedule.num_lanes,
        unit_cost=schedule.unit_cost, min_share=schedule.min_share, slack=schedule.slack,
    )  # fmt: skip
    emulation.run("emulate_latent_walk.cc", (), params, seed=1)
    works = [[dict(zip(FIELDS, row.tolist())) for row in cta] for cta in found]
    return [cta[: next(i for i, work in enumerate(cta) if work["request"] < 0)] for cta in works]


def assert_shared_out(query_lens: list[int], seq_lens: list[int], num_heads: int, schedule: Schedule) -> None:
    units: dict[tuple[int, int], list[tuple[int, dict]]] = {}
    for cta, works in enumerate(works_of(query_lens, seq_lens, num_heads, schedule)):
        assert sum(work["num_parts"] > 1 for work in works) <= 2
        for work in works:
            units.setdefault((work["request"], work["first_row"]), []).append((cta, work))
    expected = {
        (request, row)
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens))
        if seq_len > 0
        for row in range(0, query_len * num_heads, ROWS)
    }
    assert set(units) == expected
    for (request, _), parts in units.items():
        parts.sort(key=lambda part: part[1]["begin"])
        ends = [0, *(work["end"] for _, work in parts)]
        assert [work["begin"] for _, work in parts] == ends[:-1]
        assert ends[-1] == -(-seq_lens[request] // KEYS) and ends == sorted(set(ends))
        first_slot = parts[0][1]["slot"]
        for number, (cta, work) in enumerate(parts):
            assert work["num_parts"] == len(parts)
            assert work["first_slot"] == first_slot == 2 * parts[0][0] + 1
            assert work["slot"] // 2 == cta == parts[0][0] + number * schedule.num_lanes
            assert work["slot"] % 2 == (number == 0)


def longest_share(works: list[list[dict]]) -> int:
    """Tiles of the CTA that has most."""
    return max(sum(work["end"] - work["begin"] for work in cta) for cta in works)


def test_every_tile_is_attended_once_by_parts_that_know_of_each_other() -> None:
    random.seed(5)
    for number in range(80):
        num_requests, longest = random.choice([1, 2, 7, 30, 150]), random.choice([60, 500, 3000, 20_000])
        lengths = [0, longest, random.randint(1, longest)] if number % 2 else [0, longest, longest]
        seq_lens = sorted((random.choice(lengths) for _ in range(num_requests)), key=lambda length: length == 0)
        query_lens = [min(length, random.choice([0, 1, 1, 1, 3])) for length in seq_lens]
        schedule = Schedule(
            random.randint(1, 20), random.randint(1, 3), random.randint(0, 3), random.randint(1, 8),
            random.randint(0, 6),
        )  # fmt: skip
        assert_shared_out(query_lens, seq_lens, random.choice([16, 20, 40]), schedule)


@pytest.mark.parametrize(("num_requests", "parts", "longest"), [(40, 1, 32), (20, 1, 16), (10, 2, 8), (38, 1, 32)])
def test_equal_requests_are_whole_or_in_even_parts(num_requests: int, parts: int, longest: int) -> None:
    """16 tiles each for 20 CTAs, though a few of these have nothing to do; padding is no request."""
    works = works_of([1] * num_requests + [0] * 9, [1024] * num_requests + [0] * 9, 16, Schedule(20, 1, 2, 6, 3))
    assert {work["num_parts"] for cta in works for work in cta} == {parts}
    assert longest_share(works) == longest


def test_equal_requests_are_cut_where_whole_ones_would_take_much_longer() -> None:
    assert longest_share(works_of([1] * 30, [1024] * 30, 16, Schedule(20, 1, 2, 6, 3))) < 28


def test_unequal_requests_fill_all_ctas_evenly() -> None:
    random.seed(1)
    seq_lens = [random.randint(500, 4000) for _ in range(64)]
    works = works_of([1] * 64, seq_lens, 16, Schedule(20, 1, 2, 6, 3))
    mean = sum(-(-length // KEYS) + 2 for length in seq_lens) / 20
    assert longest_share(works) <= mean + 1
