"""Ragged attention in CUDA: right where there is a Hopper GPU; everywhere: what the compiler makes of it, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper import assert_compiles_well, hopper_device
from ragged_cases import dense_ragged, ragged_case
from slipstream_kernels import ops
from slipstream_kernels.attention.cuda import ragged_attention as cuda_ragged
from slipstream_kernels.attention.ragged_call import RaggedCall
from tolerances import ATTENTION

SCALE = 0.07
# Queries and keys of each request.  Causal: their own keys, or more before them; rows without any key.
CAUSAL = ([150, 1, 128, 0, 5, 260], [150, 1, 128, 0, 300, 700])
FEW_KEYS = ([140, 9], [100, 0])
# Keys before them, of which some have none.
BEFORE = ([130, 2, 40, 1], [70, 200, 0, 513])


@pytest.mark.parametrize("sizes", cuda_ragged.SIZES, ids=str)
def test_compiles_without_spills_or_serialised_products(sizes) -> None:
    assert_compiles_well(cuda_ragged.SOURCE, cuda_ragged.variant(torch.bfloat16, sizes))


def test_what_the_kernel_cannot_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ragged_case([3], [3], torch.bfloat16, torch.device("cpu"), (128, 64, 128))
    out = torch.empty(3, 3, 128, dtype=torch.bfloat16)
    call = RaggedCall(*case, SCALE, out, torch.empty(3, 3))
    keys, odd = call.keys, torch.empty(5, 65, dtype=torch.bfloat16)[:, 1:]
    assert "q is on cpu" in str(cuda_ragged.refusal(call))
    monkeypatch.setattr(cuda_ragged, "hopper_refusal", lambda device, what: None)
    monkeypatch.setattr(cuda_ragged, "build_refusal", lambda source, defines: None)
    assert cuda_ragged.refusal(call) is None
    for refused, reason in (
        (replace(call, q=call.q.float()), "q is torch.float32, not bfloat16 or float16"),
        (replace(call, keys=replace(keys, v=keys.v[..., :64])), r"are (128, 64, 64), not one of"),
        (replace(call, keys=replace(keys, k=keys.k[:0])), "there are no keys"),
        (replace(call, keys=replace(keys, k_rope=odd)), "the rows of k_rope do not begin"),
    ):
        assert reason in str(cuda_ragged.refusal(refused))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", cuda_ragged.SIZES, ids=str)
@pytest.mark.parametrize("lens, is_causal", [(CAUSAL, True), (FEW_KEYS, True), (BEFORE, False)], ids=str)
@pytest.mark.parametrize("num_heads", [1, 20])
def test_the_kernel_is_right(num_heads, lens, is_causal, sizes, dtype) -> None:
    """Unused rows behind each request's keys are NaN."""
    query_lens, key_lens = lens
    case = ragged_case(query_lens, key_lens, dtype, hopper_device(), sizes, num_heads, is_causal)
    expected = dense_ragged(case, SCALE)
    rtol, atol = ATTENTION[dtype]
    for _ in range(2):  # the counters of work are left as they were found
        out = torch.full((*case[0].shape[:2], sizes[2]), float("nan"), dtype=dtype, device=case[0].device)
        _, lse = ops.ragged_attention(*case, scale=SCALE, out=out, backend="cuda")
        torch.testing.assert_close(out.double().cpu(), expected[0], rtol=rtol, atol=atol)
        torch.testing.assert_close(lse.double().cpu(), expected[1], rtol=rtol, atol=atol)
