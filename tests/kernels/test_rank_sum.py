"""Sums over ranks in CUDA. The ranks are streams of one GPU here, whose kernels wait for each other."""

from __future__ import annotations

import time

import pytest
import torch
from hopper import assert_compiles_well
from slipstream_kernels.comm.cuda import rank_sum
from slipstream_kernels.comm.cuda.rank_sum import RankSum, Way, clear_mailbox, mailbox_bytes

MAX_BYTES = 1 << 18
SHORT, PARTS = Way(1 << 13), Way(MAX_BYTES, in_parts=True)
WIDE, WIDE_PARTS = Way(1 << 17, is_wide=True), Way(MAX_BYTES, is_wide=True, in_parts=True)
WAYS = {
    "short": (Way(MAX_BYTES),),
    "short parts": (PARTS,),
    "short, in parts": (SHORT, PARTS),
    "wide": (Way(MAX_BYTES, is_wide=True),),
    "wide parts": (WIDE_PARTS,),
    "short, wide, in parts": (SHORT, WIDE, WIDE_PARTS),
    "short, in parts, wide": (SHORT, Way(1 << 15, in_parts=True), Way(MAX_BYTES, is_wide=True)),
}


def make_ranks(
    num_ranks: int, dtype: torch.dtype, device: torch.device, ways: tuple[Way, ...] = (SHORT, PARTS)
) -> tuple[list[RankSum], list[torch.Tensor]]:
    """The ranks, and their mailboxes, which must live as long."""
    size = mailbox_bytes(num_ranks, ways)
    boxes = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    for box in boxes:
        clear_mailbox(box, num_ranks, ways)
    addresses = [box.data_ptr() for box in boxes]
    return [RankSum(rank, addresses, ways, dtype, device) for rank in range(num_ranks)], boxes


def test_compiles_without_spills() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert_compiles_well(rank_sum.SOURCE, rank_sum.defines(dtype))


def test_refusal_says_why() -> None:
    assert rank_sum.refusal(torch.device("cpu"), torch.bfloat16, 2) == "ranks are on cpu"


def test_a_mailbox_holds_two_sums_of_either_way() -> None:
    """16 bytes for each 8, or 128 for 120: of all ranks' tensors, or of parts of them and the sums. Short and wide
    lines have a mailbox of their own each, as data of one lie where the other has its number."""
    assert mailbox_bytes(4, [Way(1 << 10)]) == 2 * 2 * 4 * (1 << 10)
    assert mailbox_bytes(4, [Way(1 << 10), Way(1 << 12, in_parts=True)]) == 2 * 2 * 2 * (1 << 12)
    assert mailbox_bytes(2, [Way(1200, is_wide=True)]) == 2 * 2 * 10 * 128
    parts = 2 * 3 * 32 * 16 + 2 * 128 * 2  # of one warp's units each
    assert mailbox_bytes(3, [Way(240, is_wide=True, in_parts=True)]) == parts
    both = mailbox_bytes(2, [Way(1 << 10), Way(1200, is_wide=True)])
    assert both == mailbox_bytes(2, [Way(1 << 10)]) + mailbox_bytes(2, [Way(1200, is_wide=True)])


def test_wide_lines_begin_at_their_size() -> None:
    """Behind short ones of whatever number: what a copy of 128 bytes across two lines brought would come in two."""
    for most in (8, 24, 1000):
        short = mailbox_bytes(3, [Way(most)])
        behind = mailbox_bytes(3, [Way(most), Way(240, is_wide=True)]) - mailbox_bytes(3, [Way(240, is_wide=True)])
        assert behind >= short and behind % 128 == 0


@pytest.mark.parametrize("ways", WAYS)
def test_a_cleared_mailbox_has_no_number_of_a_sum(ways: str) -> None:
    """Whatever the number, also of sum 2^32, which is 0: what side 0 holds is odd, what side 1 holds is even."""
    size = mailbox_bytes(3, WAYS[ways])
    mailbox = torch.full((size,), 0xAB, dtype=torch.uint8)
    clear_mailbox(mailbox, 3, WAYS[ways])
    short = mailbox_bytes(3, [way for way in WAYS[ways] if not way.is_wide])
    for lines in (mailbox[:short], mailbox[short:]):
        even_sums, odd_sums = lines.view(torch.int32).view(2, -1)
        assert bool((even_sums % 2 == 1).all()) and bool((odd_sums % 2 == 0).all())


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_parts_are_of_whole_warps_and_cover_all(num_ranks: int) -> None:
    for is_wide in (False, True):
        way = Way(1 << 20, is_wide, in_parts=True)
        for num_bytes in (8, 1000, 120 * 8, 1 << 17, 1 << 20):
            part = way.part(num_bytes, num_ranks)
            assert part % 32 == 0 and part * num_ranks >= way.units(num_bytes)
            assert num_ranks * part + way.units(num_bytes) <= way.side_units(num_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("ways", WAYS)
def test_every_rank_has_the_sum(hopper: torch.device, ways: str, num_ranks: int, dtype: torch.dtype) -> None:
    """To the bit, added in fp32 in the order of ranks. Each rank has many sums of changing sizes before it, whole and
    in parts: what lies in mailboxes from earlier ones is not taken, and a rank may be one ahead."""
    ranks, boxes = make_ranks(num_ranks, dtype, hopper, WAYS[ways])
    streams = [torch.cuda.Stream() for _ in ranks]
    most = MAX_BYTES // dtype.itemsize
    sizes = (8, most, 24, 4096, 4096, most, 1000, 16384, 8, 8, 64, most)
    parts = [[torch.randn(size, device=hopper).to(dtype) for size in sizes] for _ in ranks]
    assert all(one.takes(part) for one, own in zip(ranks, parts) for part in own)
    torch.cuda.synchronize()
    totals: list[list[torch.Tensor]] = []
    for summands in zip(*parts):  # all ranks' first: streams may share a queue of the GPU, where a rank's next would
        totals.append([])  # wait for its own sum, and the others behind it
        for one, part, stream in zip(ranks, summands, streams):
            with torch.cuda.stream(stream):
                totals[-1].append(one(part))
    torch.cuda.synchronize()
    for found, summands in zip(totals, zip(*parts)):
        expected = summands[0].float()
        for part in summands[1:]:
            expected = expected + part.float()
        assert all(torch.equal(total, expected.to(dtype)) for total in found)
    assert len(boxes) == num_ranks


@pytest.mark.parametrize("ways", WAYS)
def test_a_sum_whose_number_is_zero_again(hopper: torch.device, ways: str) -> None:
    """The first rank waits for the second, though no sum before has written the lines that it reads."""
    ranks, _boxes = make_ranks(2, torch.bfloat16, hopper, WAYS[ways])
    parts = [torch.full((MAX_BYTES // 2,), value, dtype=torch.bfloat16, device=hopper) for value in (1.0, 2.0)]
    streams, totals = [torch.cuda.Stream() for _ in ranks], []
    for one in ranks:
        one._counters[0] = -1  # so many sums, modulo 2^32, have been
    torch.cuda.synchronize()
    for one, part, stream in zip(ranks, parts, streams):
        with torch.cuda.stream(stream):
            totals.append(one(part))
        time.sleep(0.05)  # the first is well under way before the second begins
    torch.cuda.synchronize()
    assert all(bool((total == 3).all()) for total in totals)
    assert [int(one._counters[0]) for one in ranks] == [0, 0]


@pytest.mark.parametrize("ways", ["short, in parts", "short, wide, in parts"])
@pytest.mark.parametrize("size", [4096, 8192, 1 << 17])
def test_graphs_of_sums(hopper: torch.device, size: int, ways: str) -> None:
    """Captured once, replayed with other numbers, between sums that are not captured."""
    ranks, _boxes = make_ranks(2, torch.bfloat16, hopper, WAYS[ways])
    parts = [torch.empty(size, dtype=torch.bfloat16, device=hopper) for _ in ranks]
    streams, graphs, totals = [torch.cuda.Stream() for _ in ranks], [], []
    for one, part, stream in zip(ranks, parts, streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            totals.append(one(one(part)))
        graphs.append(graph)
    for value in range(5):
        for rank, part in enumerate(parts):
            part.fill_(value + rank)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(bool((total == 4 * value + 2).all()) for total in totals)
        again = []
        for one, part, stream in zip(ranks, parts, streams):
            with torch.cuda.stream(stream):
                again.append(one(part))
        torch.cuda.synchronize()
        assert all(bool((total == 2 * value + 1).all()) for total in again)


def test_what_it_takes(hopper: torch.device) -> None:
    (one, _), _boxes = make_ranks(2, torch.bfloat16, hopper)
    rows = torch.zeros(9, 1 << 14, dtype=torch.bfloat16, device=hopper)
    assert [one.takes(rows[:count]) for count in (0, 1, 8, 9)] == [False, True, True, False]
    assert not one.takes(rows[:1].float()) and not one.takes(rows[:8].T) and not one.takes(rows[0, :3])
