"""prepare_draft_inputs: the reference row by row, Triton-lang against the reference."""

from __future__ import annotations

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.triton.interpreter import IS_INTERPRETING

SIZE, NUM_POSITIONS = 8, 40
TABLES = torch.tensor([[3, 1, -1, 0], [5, 2, 4, 6], [7, -1, -1, -1], [8, 9, 10, 11], [0, 0, 0, 0]], dtype=torch.int32)
# The last row's position and the cached tokens of five requests; the fifth pads.
POSITIONS, SEQ_LENS = [13, 20, 5, 30, 0], [14, 21, 6, 31, 0]


def found(backend: str, device: torch.device, first: int, num_rows: int, rows_per_level: int) -> ops.LevelRows:
    positions = torch.tensor([value for position in POSITIONS for value in (99, position)], device=device)
    last = torch.arange(1, 10, 2, device=device)
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32, device=device)
    places = ops.LevelPlaces(first, num_rows, rows_per_level)
    tables = torch.cat([TABLES, TABLES], dim=1).to(device)[:, :4]
    return ops.prepare_draft_inputs(
        positions, last, seq_lens, tables, places, block_size=SIZE, num_positions=NUM_POSITIONS, backend=backend
    )


@pytest.mark.parametrize(("first", "num_rows", "rows_per_level"), [(0, 1, 1), (2, 1, 1), (0, 6, 3), (0, 12, 4)])
def test_rows_lie_behind_their_request_or_nowhere(first: int, num_rows: int, rows_per_level: int) -> None:
    rows = found("reference", torch.device("cpu"), first, num_rows, rows_per_level)
    positions, slots = rows.positions.view(5, -1).tolist(), rows.slots.view(5, -1).tolist()
    for request, (position, seq_len) in enumerate(zip(POSITIONS, SEQ_LENS)):
        places = [position + 1 + first + row for row in range(num_rows)]
        tables = TABLES[request].tolist()
        blocks = [tables[place // SIZE] if place // SIZE < 4 else -1 for place in places]
        is_whole = seq_len > 0 and min(blocks) >= 0
        expected = [block * SIZE + place % SIZE for block, place in zip(blocks, places)]
        assert slots[request] == (expected if is_whole else [-1] * num_rows)
        assert rows.seq_lens[request] == (places[-1] + 1 if is_whole else 0)
        deep = [position + 1 + first + row // rows_per_level for row in range(num_rows)]
        assert positions[request] == [min(place, NUM_POSITIONS - 1) for place in deep]


def test_triton_is_the_reference() -> None:
    if not (IS_INTERPRETING or torch.cuda.is_available()):
        pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device")
    device = torch.device("cpu" if IS_INTERPRETING else "cuda")
    for places in ((0, 1, 1), (3, 2, 1), (0, 12, 4), (1, 20, 5)):
        rows, expected = found("triton", device, *places), found("reference", device, *places)
        is_whole = (expected.seq_lens > 0).repeat_interleave(places[1])
        assert torch.equal(rows.seq_lens, expected.seq_lens)
        assert torch.equal(rows.positions, expected.positions)
        assert torch.equal(rows.slots, expected.slots) and (rows.slots[~is_whole] == -1).all()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="num_rows: 65"):
        found("reference", torch.device("cpu"), 0, 65, 1)
    with pytest.raises(ValueError, match=r"last: torch\.int32"):
        last = torch.zeros(1, dtype=torch.int32)
        places = ops.LevelPlaces(0, 1, 1)
        ops.prepare_draft_inputs(last.long(), last, last, last[None], places, block_size=8, num_positions=9)
