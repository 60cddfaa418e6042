"""sample's second pass in CUDA: the reference's tokens where there is a Hopper GPU; elsewhere, that it compiles."""

from __future__ import annotations

import pytest
import torch
from hopper import assert_compiles_well
from sampling_cases import random_rows, sample_rows
from slipstream_kernels import ops
from slipstream_kernels.sample.cuda import sample as cuda_sample

UNUSED = [(), ("top_k",), ("top_p", "min_p"), ("top_k", "top_p")]


def test_compiles_without_spills() -> None:
    assert_compiles_well(cuda_sample.SOURCE, cuda_sample.defines(torch.bfloat16))


def test_refusal_says_why() -> None:
    rows = random_rows(2, 64, torch.device("cpu"))
    assert cuda_sample.refusal(rows["logits"]) == "logits are on cpu"
    with pytest.raises(ValueError, match="cuda cannot run sample: logits are on cpu"):
        sample_rows(**rows, backend="cuda")
    with pytest.raises(ValueError, match="cuda cannot run sample: no row is filtered"):
        ops.greedy(rows["logits"], backend="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [8, 56, 1104, 9000, 128256])
def test_draws_the_references_tokens(hopper, vocab_size, dtype) -> None:
    """Rows of all settings; forbidden halves and wholes, equal logits, one too flat for the candidates."""
    rows = random_rows(40, vocab_size, hopper)
    rows["logits"] = rows["logits"].to(dtype)
    rows["logits"][1, : vocab_size // 2] = float("-inf")
    rows["logits"][2] = float("-inf")
    rows["logits"][3:5] = rows["logits"][3:5].round()
    rows["logits"][5] /= 30
    for unused in UNUSED:
        case = {name: None if name in unused else tensor for name, tensor in rows.items()}
        drawn = sample_rows(**case, backend="cuda")
        assert torch.equal(drawn, sample_rows(**case, backend="reference"))
        held = torch.full((42,), -1, device=hopper)
        assert torch.equal(drawn, sample_rows(**case, backend="cuda", out=held[1:41]))
        assert held.tolist() == [-1, *drawn.tolist(), -1]


def test_rows_that_no_filter_and_no_noise_touch(hopper) -> None:
    """Greedy and unfiltered rows among filtered ones; rows that begin between 16 bytes go elsewhere."""
    rows = random_rows(6, 1008, hopper)
    rows["temperature"] = torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0, 0.5], device=hopper)
    rows["top_k"] = torch.tensor([5, 0, 5, 0, 0, 0], dtype=torch.int32, device=hopper)
    rows["top_p"], rows["min_p"] = torch.ones(6, device=hopper), None
    assert torch.equal(sample_rows(**rows, backend="cuda"), sample_rows(**rows, backend="reference"))
    rows["logits"] = rows["logits"][:, 1:1002]
    assert cuda_sample.refusal(rows["logits"]) == "logits has rows that do not begin at multiples of 16 bytes"
    assert torch.equal(sample_rows(**rows), sample_rows(**rows, backend="reference"))
