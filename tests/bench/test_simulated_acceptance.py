"""The simulation's kernel takes the way through a tree that torch takes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slipstream_kernels.triton.interpreter import IS_INTERPRETING

sys.path.insert(0, str(Path(__file__).parent))

import simulated_acceptance


def random_words(count: int, generator: torch.Generator) -> list[int]:
    words = [1]
    for row in range(1, count + 1):
        words.append(words[int(torch.randint(0, row, (1,), generator=generator))] | 1 << row)
    return [word - (1 << 64) if word >> 63 else word for word in words]


@pytest.mark.parametrize("has_tree", [False, True])
def test_the_kernel_walks_as_torch_does(has_tree: bool) -> None:
    if not (IS_INTERPRETING or torch.cuda.is_available()):
        pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device")
    device = torch.device("cpu" if IS_INTERPRETING else "cuda")
    generator = torch.Generator().manual_seed(1)
    counts = [0, 63, 5, 12, 0]  # the last a prompt's, behind the rows that have words
    words = [word for count in counts for word in random_words(count, generator)]
    firsts = [0, 1, 65, 71, 84]
    ranks = [0, 0, 1 << 30, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]  # of five requests and three depths
    numbers = torch.tensor([*ranks, *firsts, *counts], device=device)
    num_words = len(words) - 1
    order = torch.cat([torch.randperm(num_words, generator=generator), torch.tensor([1000])]).to(device)
    tree_mask = torch.empty(num_words, dtype=torch.int64, device=device)
    tree_mask[order[:-1]] = torch.tensor(words[:-1], device=device)
    batch = SimpleNamespace(logits_indices=order, tree_mask=tree_mask if has_tree else None)
    arguments = (batch, numbers, len(counts), len(words))
    found = simulated_acceptance._walk_by_kernel(*arguments)
    assert found.tolist() == simulated_acceptance._walk(*arguments).tolist()
    assert set(found.tolist()) == {-1, 1}
