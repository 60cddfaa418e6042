"""update_step_inputs: the reference against plain Python, triton against the reference."""

from __future__ import annotations

import random

import pytest
import torch
from slipstream_kernels import ops

BLOCK_SIZE, WIDTH = 4, 12


class Case:
    """Requests of 1 + num_drafts rows each, of which some hold; the last request is padding, one lacks a block."""

    def __init__(self, seed: int, num_drafts: int, is_tree: bool) -> None:
        dice = random.Random(seed)
        self.num_drafts, self.is_tree, self.num_requests = num_drafts, is_tree, 5
        self.num_rows = 1 + num_drafts
        self.starts = [dice.randrange(3, 12) for _ in range(self.num_requests)]
        self.parents = [[dice.randrange(-1, draft) for draft in range(num_drafts)] for _ in range(self.num_requests)]
        depths = [[0] * self.num_rows for _ in range(self.num_requests)]
        self.words = [[1] + [0] * num_drafts for _ in range(self.num_requests)]
        for request, parents in enumerate(self.parents):
            for draft, parent in enumerate(parents if is_tree else range(-1, num_drafts - 1)):
                depths[request][draft + 1] = depths[request][parent + 1] + 1
                self.words[request][draft + 1] = self.words[request][parent + 1] | 2 << draft
        self.depths = depths
        self.tables = [dice.sample(range(99), WIDTH) for _ in range(self.num_requests)] + [[-1] * WIDTH]
        self.tables[2][(self.starts[2] + 1) // BLOCK_SIZE :] = [-1] * (WIDTH - (self.starts[2] + 1) // BLOCK_SIZE)
        self.last = [dice.randrange(self.num_rows) for _ in range(self.num_requests)]
        count = self.num_requests * self.num_rows
        self.next_ids = [dice.randrange(500) for _ in range(count + 1)]
        self.drafts = [[dice.randrange(500) for _ in range(num_drafts)] for _ in range(self.num_requests + 1)]

    def run(self, device: torch.device, backend: str) -> ops.StepRows:
        ints = lambda values, dtype=torch.int64: torch.tensor(values, dtype=dtype, device=device)  # noqa: E731
        positions = [start + depth for start, depths in zip(self.starts, self.depths) for depth in depths] + [0]
        rows = ops.StepRows(
            token_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
            positions=ints(positions),
            slot_mapping=torch.full((len(positions),), -1, dtype=torch.int64, device=device),
            seq_lens=ints([start + self.num_rows for start in self.starts] + [0], torch.int32),
            block_tables=ints(self.tables, torch.int32),
            tree_mask=torch.ones(len(positions), dtype=torch.int64, device=device) if self.is_tree else None,
        )
        last = [request * self.num_rows + row for request, row in enumerate(self.last)] + [0]
        tree = [ints([words[1:] for words in [*self.words, self.words[0]]])] if self.is_tree else [None]
        tree += [ints([depths[1:] for depths in [*self.depths, self.depths[0]]])] if self.is_tree else [None]
        drafts = ops.DraftRows(ints(self.drafts), *tree)
        next_ids = ints(self.next_ids)
        ops.update_step_inputs(rows, self.num_requests, next_ids, ints(last), drafts, BLOCK_SIZE, backend=backend)
        return rows


CASES = [(seed, num_drafts, is_tree) for seed in range(2) for num_drafts in (1, 3, 15) for is_tree in (True, False)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_go_on_from_the_last_that_holds(case: tuple[int, int, bool]) -> None:
    made = Case(*case)
    rows = made.run(torch.device("cpu"), "reference")
    for request in range(made.num_requests):
        own = slice(request * made.num_rows, (request + 1) * made.num_rows)
        start = made.starts[request] + made.depths[request][made.last[request]] + 1
        places = range(start, start + made.num_rows)
        columns = [place // BLOCK_SIZE for place in places]
        is_whole = columns[-1] < WIDTH and all(made.tables[request][column] >= 0 for column in columns)
        slots = [made.tables[request][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
        first = made.next_ids[request * made.num_rows + made.last[request]]
        assert rows.token_ids[own].tolist() == [first, *made.drafts[request]]
        assert rows.positions[own].tolist() == [start + depth for depth in made.depths[request]]
        assert rows.slot_mapping[own].tolist() == (slots if is_whole else [-1] * made.num_rows)
        assert rows.seq_lens[request] == (start + made.num_rows if is_whole else 0)
        if rows.tree_mask is not None:
            assert rows.tree_mask[own].tolist() == made.words[request]
    assert rows.seq_lens[-1] == 0 and rows.slot_mapping[-1] == -1, "padding stays"
    assert rows.seq_lens[2] == 0, "this one lacks blocks"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_is_the_reference(case: tuple[int, int, bool], device: torch.device) -> None:
    made = Case(*case)
    found, expected = made.run(device, "triton"), made.run(torch.device("cpu"), "reference")
    for name, tensor in expected._asdict().items():
        if tensor is not None:
            assert torch.equal(getattr(found, name).cpu(), tensor), name


def test_bad_arguments_are_named() -> None:
    made = Case(0, 3, False)
    rows = made.run(torch.device("cpu"), "reference")
    ids = torch.zeros(2, 3, dtype=torch.int64)
    next_ids, last = torch.zeros_like(rows.token_ids), torch.zeros(6, dtype=torch.int64)
    short = rows.token_ids[:-1]
    for field, num_requests, given, drafts in (
        ("num_requests", 99, {}, ops.DraftRows(ids)),
        ("words", 1, {}, ops.DraftRows(ids, ids, ids)),
        ("drafts", 1, {}, ops.DraftRows(ids[:, :0])),
        ("drafts", 3, {}, ops.DraftRows(ids)),
        ("drafts", 1, {}, ops.DraftRows(ids.T.contiguous().T)),
        ("last", 2, {"last": last[:1]}, ops.DraftRows(ids)),
        ("next_ids", 1, {"next_ids": short}, ops.DraftRows(ids)),
        ("positions", 1, {"positions": short}, ops.DraftRows(ids)),
        ("slot_mapping", 1, {"slot_mapping": rows.slot_mapping.int()}, ops.DraftRows(ids)),
        ("tree_mask", 1, {"tree_mask": short}, ops.DraftRows(ids)),
        ("seq_lens", 1, {"seq_lens": rows.seq_lens.long()}, ops.DraftRows(ids)),
        ("block_tables", 1, {"block_tables": rows.block_tables.long()}, ops.DraftRows(ids)),
        ("block_tables", 2, {"block_tables": rows.block_tables[:1]}, ops.DraftRows(ids)),
    ):
        step = rows._replace(**{name: tensor for name, tensor in given.items() if name in rows._fields})
        others = (given.get("next_ids", next_ids), given.get("last", last))
        with pytest.raises(ValueError, match=f"^{field}: "):
            ops.update_step_inputs(step, num_requests, *others, drafts, BLOCK_SIZE)
