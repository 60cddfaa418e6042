"""accept_drafts: the reference against a walk in plain Python, triton against the reference."""

from __future__ import annotations

import random

import pytest
import torch
from slipstream_kernels import ops


def drawn_tree(dice: random.Random, num_drafts: int) -> list[int]:
    """Each draft's parent, -1 the last token."""
    return [dice.randrange(-1, place) for place in range(num_drafts)]


def walk(parents: list[int], agrees: list[bool], scores: list[float]) -> list[int]:
    """Rows of the longest way along drafts that agree; of equals the one of the highest score at its end."""
    ways = [[0]]
    for draft, parent in enumerate(parents):
        way = next((way for way in ways if way[-1] == parent + 1), None)
        if agrees[draft] and way is not None:
            ways.append([*way, draft + 1])
    longest = max(map(len, ways))
    return max((way for way in ways if len(way) == longest), key=lambda way: scores[way[-1]])


class Case:
    """Requests with random trees, some after a prompt; drafts agree often. Two tokens only, so that branches tie."""

    def __init__(self, seed: int, is_tree: bool, has_marks: bool) -> None:
        dice = random.Random(seed)
        self.parents = [drawn_tree(dice, dice.choice([0, 1, 5, 20, 63])) for _ in range(6)]
        self.num_plain = [dice.choice([0, 0, 3]) for _ in self.parents]  # rows of a prompt before the last token
        self.parents = [[] if plain else parents for plain, parents in zip(self.num_plain, self.parents)]
        if not is_tree:
            self.parents = [list(range(-1, len(parents) - 1)) for parents in self.parents]
        counts = [plain + 1 + len(parents) for plain, parents in zip(self.num_plain, self.parents)]
        self.starts = [sum(counts[:place]) for place in range(len(counts) + 1)]
        num_tokens = self.starts[-1]
        self.token_ids = [dice.randrange(2) for _ in range(num_tokens)]
        self.next_ids = [dice.randrange(2) for _ in range(num_tokens)]
        self.slots = dice.sample(range(1000), num_tokens)
        self.marks = [dice.choice([-1, 0, 0, 1]) for _ in range(num_tokens)] if has_marks else None
        self.scores = [dice.random() for _ in range(num_tokens)]
        self.masks: list[int] = []
        for plain, parents in zip(self.num_plain, self.parents):
            words = [1]
            for row, parent in enumerate(parents, 1):
                words.append(words[parent + 1] | 1 << row)
            words = words if parents else [(2 << row) - 1 for row in range(plain + 1)]
            self.masks += [word - (1 << 64) if word >> 63 else word for word in words]
        self.is_tree = is_tree

    def run(self, device: torch.device, backend: str) -> ops.AcceptedRows:
        ints = lambda values, dtype=torch.int64: torch.tensor(values, dtype=dtype, device=device)  # noqa: E731
        rows = ops.VerifiedRows(
            ints(self.token_ids),
            ints(self.next_ids),
            ints(self.starts, torch.int32),
            ints([len(parents) for parents in self.parents], torch.int32),
            ints(self.slots),
            tree_mask=ints(self.masks) if self.is_tree else None,
            marks=None if self.marks is None else ints(self.marks, torch.int8),
            scores=torch.tensor(self.scores, device=device),
        )
        return ops.accept_drafts(rows, backend=backend)

    def expected(self, request: int) -> list[int]:
        parents = self.parents[request]
        first = self.starts[request] + self.num_plain[request]
        agrees = []
        for draft, parent in enumerate(parents):
            mark = self.marks[first + 1 + draft] if self.marks else 0
            is_same = self.next_ids[first + 1 + parent] == self.token_ids[first + 1 + draft]
            agrees.append(mark > 0 or (mark == 0 and is_same))
        return walk(parents, agrees, self.scores[first:])


CASES = [(seed, is_tree, has_marks) for seed in range(3) for is_tree in (True, False) for has_marks in (True, False)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_longest_way_is_taken(case: tuple[int, bool, bool]) -> None:
    made = Case(*case)
    kept = made.run(torch.device("cpu"), "reference")
    for request in range(len(made.parents)):
        rows = made.expected(request)
        first = made.starts[request] + made.num_plain[request]
        assert kept.paths[request].item() & (1 << 64) - 1 == sum(1 << row for row in rows)
        assert kept.counts[request] == len(rows)
        assert kept.last[request] == first + rows[-1]
        assert kept.sources[request, : len(rows)].tolist() == [made.slots[first + row] for row in rows]
        assert kept.targets[request, : len(rows)].tolist() == made.slots[first : first + len(rows)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_is_the_reference(case: tuple[int, bool, bool], device: torch.device) -> None:
    made = Case(*case)
    found, expected = made.run(device, "triton"), made.run(torch.device("cpu"), "reference")
    for name in ("paths", "counts", "last"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))
    for request, count in enumerate(expected.counts.tolist()):
        for name in ("sources", "targets"):
            assert torch.equal(getattr(found, name)[request, :count].cpu(), getattr(expected, name)[request, :count])


def test_bad_arguments_are_named() -> None:
    one, counts = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="num_drafts"):
        ops.accept_drafts(ops.VerifiedRows(one, one, starts, one, one))
    with pytest.raises(ValueError, match="next_ids"):
        ops.accept_drafts(ops.VerifiedRows(one, torch.zeros(2, dtype=torch.int64), starts, counts, one))
    with pytest.raises(ValueError, match="tree_mask"):
        ops.accept_drafts(ops.VerifiedRows(one, one, starts, counts, one, tree_mask=counts))
