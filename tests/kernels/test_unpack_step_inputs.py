"""unpack_step_inputs: the reference against plain Python, triton against the reference."""

from __future__ import annotations

import random

import pytest
import torch
from slipstream_kernels import ops

MAX_BLOCKS, NUM_DRAWN = 3000, 40
# groups, requests and tokens of a graph, then the rows and the width that arrive: none, some, all, wider than a block
CASES = [(1, 1, 1, 0, 0), (1, 1, 1, 1, 16), (3, 5, 9, 4, 48), (2, 3, 1500, 3, MAX_BLOCKS), (1, 7, 7, 7, 1025)]


class Case:
    """Tensors before the op. Arrived inputs are parts of one tensor, as in a step; tables and tokens are views."""

    def __init__(self, case: tuple[int, int, int, int, int]) -> None:
        dice = random.Random(str(case))
        self.num_groups, num_requests, self.num_tokens, self.num_rows, self.width = case
        self.num_entries = self.num_groups * self.num_rows * self.width
        self.entries = [dice.randrange(-1, 1 << 20) for _ in range(self.num_entries + 3)]
        self.sources = [dice.choice((-1, dice.randrange(NUM_DRAWN))) for _ in range(self.num_tokens)]
        self.drawn = [dice.randrange(1 << 40) for _ in range(NUM_DRAWN)]
        self.shape = self.num_groups, num_requests + 2, MAX_BLOCKS
        self.num_requests = num_requests

    def run(self, device: torch.device, backend: str) -> dict[str, torch.Tensor]:
        """All that may change, whole: what lies beyond the views must stay."""
        halves = torch.tensor([7, self.num_rows, self.width, *self.entries], dtype=torch.int32, device=device)
        sources = torch.tensor([*self.sources, 3, 4], device=device)
        tables = torch.full(self.shape, -7, dtype=torch.int32, device=device)
        token_ids = torch.arange(self.num_tokens + 2, device=device) + 1_000_000
        arrived = ops.ArrivedInputs(halves[1:3], halves[3:], sources[: self.num_tokens])
        drawn = torch.tensor(self.drawn, device=device)
        own = tables[:, : self.num_requests], token_ids[: self.num_tokens]
        ops.unpack_step_inputs(arrived, *own, drawn, backend=backend)
        return {"tables": tables, "token_ids": token_ids, "sources": sources, "halves": halves, "drawn": drawn}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tables_and_pending_tokens_come_into_their_places(case: tuple[int, int, int, int, int]) -> None:
    made = Case(case)
    found = made.run(torch.device("cpu"), "reference")
    entries = iter(made.entries)
    expected = torch.full(made.shape, -7, dtype=torch.int32)
    for group in range(made.num_groups):
        for row in range(made.num_rows):
            expected[group, row, : made.width] = torch.tensor([next(entries) for _ in range(made.width)])
    assert torch.equal(found["tables"], expected)
    ids = [1_000_000 + place if source < 0 else made.drawn[source] for place, source in enumerate(made.sources)]
    assert found["token_ids"].tolist() == [*ids, 1_000_000 + made.num_tokens, 1_000_001 + made.num_tokens]
    assert found["sources"].tolist() == [*[-1] * made.num_tokens, 3, 4], "each is used once"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_is_the_reference(case: tuple[int, int, int, int, int], device: torch.device) -> None:
    made = Case(case)
    found, expected = made.run(device, "triton"), made.run(torch.device("cpu"), "reference")
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor), name


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_second_run_keeps_tokens_that_changed_meanwhile(device: torch.device, backend: str) -> None:
    """A graph runs again over the inputs that ops.update_step_inputs has made of a verified step."""
    ints = lambda values, dtype=torch.int64: torch.tensor(values, dtype=dtype, device=device)  # noqa: E731
    arrived = ops.ArrivedInputs(ints([1, 2], torch.int32), ints([8, 9], torch.int32), ints([1, -1, 0]))
    tables, token_ids, drawn = torch.zeros(1, 2, 4, dtype=torch.int32, device=device), ints([5, 6, 7]), ints([50, 51])
    ops.unpack_step_inputs(arrived, tables, token_ids, drawn, backend=backend)
    assert token_ids.tolist() == [51, 6, 50]
    token_ids += 100
    ops.unpack_step_inputs(arrived, tables, token_ids, drawn, backend=backend)
    assert token_ids.tolist() == [151, 106, 150] and tables.tolist() == [[[8, 9, 0, 0], [0] * 4]]


def test_bad_arguments_are_named() -> None:
    size, tables = torch.zeros(2, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    wide, ids = torch.zeros(1, 2, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    for name, arrived, others in (
        ("size", (size[:1], tables, ids), (wide, ids, ids)),
        ("size", (size.long(), tables, ids), (wide, ids, ids)),
        ("tables", (size, tables[::2], ids), (wide, ids, ids)),
        ("sources", (size, tables, ids[:2]), (wide, ids, ids)),
        ("sources", (size, tables, ids.int()), (wide, ids, ids)),
        ("token_ids", (size, tables, ids), (wide, ids.int(), ids)),
        ("drawn", (size, tables, ids), (wide, ids, ids.int())),
        ("block_tables", (size, tables, ids), (wide[0], ids, ids)),
        ("block_tables", (size, tables, ids), (wide.mT, ids, ids)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            ops.unpack_step_inputs(ops.ArrivedInputs(*arrived), *others)
