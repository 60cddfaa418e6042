"""Attention of prompts in CUDA: its device code on a CPU, and steep scores of FP8 caches on a Hopper GPU.

tests/kernels/test_prefill_attention.py has the rest of the kernel's tests, test_stage_fp8.py those of both products in
FP8.
"""

from __future__ import annotations

from dataclasses import replace

import emulation
import pytest
import torch
from decode_cases import FP8, DecodeCase, make_case, oracle
from prefill_emulator import emulate
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import prefill_attention as cuda_prefill
from slipstream_kernels.attention.cuda import prefill_stage
from slipstream_kernels.attention.paged_attention import paged_attention
from steep_cases import steep
from tolerances import ATTENTION

needs_emulator = pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
# PrefillKv, and the type of the cache. Converted: in the kernel, to fp16.
KINDS = {
    "16 bit": (0, None),
    "converted": (cuda_prefill.KV_TYPES[FP8], FP8),
    "fp8 keys": (cuda_prefill.FP8_KEYS, FP8),
    "all fp8": (cuda_prefill.ALL_FP8, FP8),
}
# Base 2 that scores rise and fall by: 122 where queries are rounded, whose products with keys e4m3's tensor cores round
# to a part of their largest; else 600, which neither fp16 nor bf16 holds as a probability.
STEEPEST = {"16 bit": 300.0, "converted": 300.0, "fp8 keys": 60.0, "all fp8": 60.0}
# By rounding probabilities to e4m3, relative to the norm.
ALL_FP8_ERROR = 4e-2

# Tiles of keys, of which some rows do not see the first; one tile with padding, a chunk after a prefix and one token;
# heads that are not packed.
EMULATED = [
    (([140], [640]), (2, 2, 128, 64)),
    (([33, 1, 9, 1], [33, 0, 530, 300]), (8, 2, 128, 16)),
    (([70, 20], [200, 420]), (5, 1, 128, 128)),
]


def rounded(q: torch.Tensor) -> torch.Tensor:
    """As the kernel rounds it: each head of a token by its largest element."""
    unit = q.float().abs().amax(-1, keepdim=True) / 448
    return (q.float() * (torch.ones_like(unit) / unit)).to(FP8).float() * unit


def assert_right(out: torch.Tensor, case: DecodeCase, kind: str) -> None:
    in_fp8 = kind in ("fp8 keys", "all fp8")
    expected = oracle(replace(case, q=rounded(case.q)) if in_fp8 else case)
    out = out.cpu().double()
    if kind != "all fp8":
        rtol, atol = ATTENTION[case.q.dtype]
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
        return
    for head in range(out.shape[1]):
        assert (out[:, head] - expected[:, head]).norm() < ALL_FP8_ERROR * expected[:, head].norm()


@needs_emulator
@pytest.mark.parametrize("is_steep", [False, True], ids=["flat", "steep"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lens", "geometry"), EMULATED)
def test_the_device_code_is_right_and_ends(lens, geometry, kind, is_steep) -> None:
    """Copies arrive late and products are done late: early reads, early releases and deadlocks show."""
    kv, kv_dtype = KINDS[kind]
    case = make_case(*lens, geometry, torch.bfloat16, kv_dtype, seed=len(lens[0]))
    case = steep(case, STEEPEST[kind]) if is_steep else case
    call = AttentionCall(*case.arguments(), torch.full_like(case.q, float("nan")))
    emulate(call, kv, seed=len(lens[0]))
    assert_right(call.out, case, kind)


@pytest.mark.parametrize("kind", ["converted", "fp8 keys", "all fp8"])
def test_sums_follow_steep_scores(hopper, kind, monkeypatch) -> None:
    if kind != "converted":
        monkeypatch.setattr(prefill_stage, "MIN_QUERY_LEN", 0)
        monkeypatch.setattr(prefill_stage, "MIN_FP8_SEQ_LEN", 0)
        monkeypatch.setattr(prefill_stage, "MAX_RATIO", 1 << 20)
    case = make_case([1, 301, 40], [900, 301, 1500], (8, 2, 128, 64), torch.bfloat16, FP8, seed=7)
    case = steep(case, STEEPEST[kind])
    moved = case.to(hopper)
    arguments = moved.arguments(fp8_queries=kind != "converted", fp8_probs=kind == "all fp8")
    out = torch.full_like(moved.q, float("nan"))
    assert cuda_prefill.source_of_keys_and_values(AttentionCall(*arguments, out)) == KINDS[kind][0]
    assert_right(paged_attention(*arguments, out=out, backend="cuda"), case, kind)
