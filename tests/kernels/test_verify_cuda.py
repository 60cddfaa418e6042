"""Attention of many verify rows in CUDA: its device code on a CPU, and steep scores on a Hopper GPU.

tests/kernels/test_decode_attention.py has the rest of the kernel's tests.
"""

from __future__ import annotations

import emulation
import pytest
import torch
from decode_cases import FP8, DecodeCase, chain_or_tree, make_case, oracle
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import verify_attention as cuda_verify
from slipstream_kernels.attention.decode_attention import decode_attention
from steep_cases import steep
from tolerances import ATTENTION
from verify_emulator import emulate

needs_emulator = pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
KINDS = [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, FP8), (torch.float16, FP8)]
IDS = [f"{str(q).split('.')[1]}, {'its cache' if kv is None else 'fp8'}" for q, kv in KINDS]
# Base 2 that scores rise by: 600, which neither fp16 nor bf16 holds as a probability.
STEEPEST = 300.0

# One tile a CTA, of which some rows see nothing; tiles of one CTA; a padding request, one without rows, one whose rows
# are its whole context; a CTA without keys.
EMULATED = [
    (([40, 3], [90, 200]), (4, 2, 128, 64), 2),
    (([12], [600]), (6, 1, 128, 16), 2),
    (([5, 0, 1, 17], [33, 9, 0, 17]), (8, 2, 128, 32), 4),
    (([30], [420]), (4, 1, 128, 128), 4),
]


def call_of(case: DecodeCase) -> AttentionCall:
    return AttentionCall(*case.arguments(), torch.full_like(case.q, float("nan")))


def assert_right(out: torch.Tensor, case: DecodeCase) -> None:
    rtol, atol = ATTENTION[case.q.dtype]
    used = int(case.query_start_loc[-1])
    torch.testing.assert_close(out[:used].cpu().double(), oracle(case)[:used], rtol=rtol, atol=atol)


@needs_emulator
@pytest.mark.parametrize("is_steep", [False, True], ids=["flat", "steep"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=IDS)
@pytest.mark.parametrize(("lens", "geometry", "splits"), EMULATED)
def test_the_device_code_is_right_and_ends(lens, geometry, splits, dtype, kv_dtype, is_steep) -> None:
    """Chains and trees; copies arrive late and products are done late."""
    case = make_case(*lens, geometry, dtype, kv_dtype, seed=splits)
    for seed, drafts in enumerate((case, chain_or_tree(case, seed=splits))):
        drafts = steep(drafts, STEEPEST) if is_steep else drafts
        call = call_of(drafts)
        emulate(call, splits, seed)
        assert_right(call.out, drafts)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=IDS)
def test_sums_follow_steep_scores(hopper, dtype, kv_dtype) -> None:
    case = make_case([64, 40, 0, 33], [1500, 900, 0, 64], (8, 2, 128, 64), dtype, kv_dtype, seed=5)
    for drafts in (case, chain_or_tree(case, seed=5)):
        drafts = steep(drafts, STEEPEST)
        moved = drafts.to(hopper)
        assert cuda_verify.takes(call_of(moved))
        out = torch.full_like(moved.q, float("nan"))
        assert_right(decode_attention(*moved.arguments(), out=out, backend="cuda"), drafts)
