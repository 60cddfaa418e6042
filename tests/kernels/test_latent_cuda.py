"""Latent attention in CUDA: its device code on a CPU, and the kernel on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import emulation
import pytest
import torch
from hopper import hopper_device
from latent_cases import LatentCase, dense_latent_attention, make_latent_case
from latent_emulator import emulate
from slipstream_kernels import ops
from slipstream_kernels.attention.cuda import latent_attention as cuda_latent
from slipstream_kernels.attention.cuda.latent_attention import Schedule
from slipstream_kernels.attention.latent_attention import prefers_cuda
from slipstream_kernels.attention.latent_call import LatentCall
from tolerances import ATTENTION

SCALE = 0.05
needs_emulator = pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))


def make_case(
    query_lens: list[int], seq_lens: list[int], num_heads: int, *, block_size: int = 64, has_tree: bool = False,
    is_fp8: bool = False, device: torch.device,
) -> LatentCase:  # fmt: skip
    sizes = (num_heads, cuda_latent.RANK, cuda_latent.ROPE_DIM, block_size)
    return make_latent_case(
        query_lens, seq_lens, sizes=sizes, dtype=torch.bfloat16, is_fp8=is_fp8, has_tree=has_tree, device=device
    )  # fmt: skip


def steep(case: LatentCase) -> LatentCase:
    """Scores 40 times as large: of many tiles the largest lies far above those of all earlier ones.

    Not of FP8 rows, which become bf16 with their scales: that alone moves such scores too far.
    """
    return replace(case, q=case.q * 40)


def call_of(case: LatentCase) -> LatentCall:
    out = torch.full((*case.q.shape[:2], cuda_latent.RANK), float("nan"), dtype=case.q.dtype, device=case.q.device)
    return LatentCall(*case.arguments(), SCALE, out)


def assert_right(call: LatentCall, case: LatentCase) -> None:
    rtol, atol = ATTENTION[torch.bfloat16]
    torch.testing.assert_close(call.out.double().cpu(), dense_latent_attention(case, SCALE), rtol=rtol, atol=atol)


# One tile; pairs; an odd tile, a padding request and one without rows, cut into parts; lanes, of which some have no
# rows; a tree in blocks of 128; much padding, and nothing else; rings that go round; several units of a CTA; equal
# units, in even parts and whole.
EMULATED = [
    (([1], [40], 16), Schedule(1, 1), {}),
    (([1], [330], 16), Schedule(1, 1), {}),
    (([1, 2, 0, 1, 1], [100, 330, 9, 0, 64], 20), Schedule(5, 1, 1, 2), {}),
    (([2, 1], [140, 300], 64), Schedule(2, 3, 2, 2), {}),
    (([4, 1], [200, 150], 16), Schedule(3, 2, 0, 1), {"has_tree": True, "block_size": 128}),
    (([1] * 6, [0, 90, 0, 0, 0, 0], 16), Schedule(2, 1), {}),
    (([1] * 3, [0] * 3, 16), Schedule(2, 1), {}),
    (([1, 1], [1900, 1400], 16), Schedule(2, 1), {}),
    (([1] * 7, [500, 480, 130, 700, 64, 65, 600], 16), Schedule(5, 1, 2, 4), {}),
    (([1, 1, 1], [640, 640, 600], 20), Schedule(7, 1, 2, 3), {}),
    (([2, 2, 2, 0, 2, 1], [200, 200, 193, 90, 200, 200], 40), Schedule(4, 1, 1, 3), {}),
]


@needs_emulator
@pytest.mark.parametrize("is_joined", [False, True], ids=["merged", "joined"])
@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("rows", cuda_latent.ROWS)
@pytest.mark.parametrize(("sizes", "schedule", "options"), EMULATED)
def test_the_device_code_is_right_and_ends(sizes, schedule, options, rows, is_fp8, is_joined) -> None:
    """Copies arrive late and products are done late: early reads, early releases and deadlocks show.

    Requests of more rows than a CTA has take several; parts are added up by the last CTA or by a second kernel.
    """
    case = make_case(*sizes, is_fp8=is_fp8, device=torch.device("cpu"), **options)
    call = call_of(case)
    emulate(call, replace(schedule, rows=rows, is_joined=is_joined), seed=len(case.query_lens))
    assert_right(call, case)


@needs_emulator
@pytest.mark.parametrize(("sizes", "schedule", "options"), [EMULATED[3], EMULATED[4], EMULATED[8]])
def test_sums_follow_scores_that_rise(sizes, schedule, options) -> None:
    case = steep(make_case(*sizes, device=torch.device("cpu"), **options))
    call = call_of(case)
    emulate(call, replace(schedule, rows=64, is_joined=True), seed=len(case.query_lens))
    assert_right(call, case)


def test_schedules_fill_the_gpu_with_lanes_of_the_mean_request() -> None:
    case = make_case([1], [64], 128, device=torch.device("cpu"))
    for num_tokens, num_heads, expected in (
        (1, 16, (132, 1, 16)),
        (1, 20, (132, 1, 24)),
        (1, 32, (132, 1, 32)),
        (2, 16, (132, 1, 32)),
        (1, 128, (66, 2, 64)),
        (4, 20, (66, 2, 64)),
        (64, 128, (33, 4, 64)),
    ):
        q = torch.empty(num_tokens, num_heads, 576, dtype=torch.bfloat16)
        schedule = cuda_latent.choose_schedule(replace(call_of(case), q=q), 132)
        assert (schedule.num_shares, schedule.num_lanes, schedule.rows) == expected


def test_parts_of_many_requests_are_added_up_in_one_launch() -> None:
    for num_requests, is_joined in ((15, False), (16, True)):
        call = call_of(make_case([1] * num_requests, [64] * num_requests, 16, device=torch.device("cpu")))
        assert cuda_latent.choose_schedule(call, 132).is_joined == is_joined


def test_refusals_name_what_is_not_served(monkeypatch) -> None:
    monkeypatch.setattr(cuda_latent, "hopper_refusal", lambda *_: None)
    monkeypatch.setattr(cuda_latent, "build_refusal", lambda *_: None)
    call = call_of(make_case([1], [64], 16, device=torch.device("cpu")))
    assert cuda_latent.refusal(call) is None
    small = make_latent_case([1], [9], sizes=(2, 128, 16, 16), dtype=torch.bfloat16, device=torch.device("cpu"))
    fp8 = make_case([1], [9], 2, is_fp8=True, device=torch.device("cpu"))
    assert cuda_latent.refusal(call_of(fp8)) is None
    for refused, reason in (
        (replace(call, q=call.q.float()), "q is torch.float32 and the cache torch.bfloat16, not bfloat16"),
        (replace(call, cache=small.cache), "128 \\+ 16 features, not 512 \\+ 64"),
        (replace(call, metadata=replace(call.metadata, max_query_len=65)), "max_query_len 65 is more than 64"),
        (call_of(make_case([1], [9], 2, block_size=32, device=torch.device("cpu"))), "block_size 32"),
    ):
        with pytest.raises(AssertionError, match=reason):
            assert not cuda_latent.refusal(refused)
    with pytest.raises(ValueError, match="backend: cuda cannot run latent_attention: q is on cpu"):
        monkeypatch.undo()
        attend(make_case([1], [64], 16, device=torch.device("cpu")))


def test_auto_leaves_one_token_over_a_short_context_to_triton() -> None:
    call = call_of(make_case([1], [64], 16, device=torch.device("cpu")))
    assert not prefers_cuda(call)
    assert prefers_cuda(replace(call, metadata=replace(call.metadata, max_seq_len=1 << 17)))
    assert prefers_cuda(call_of(make_case([1], [64], 16, is_fp8=True, device=torch.device("cpu"))))
    assert prefers_cuda(call_of(make_case([1, 1], [64, 9], 16, device=torch.device("cpu"))))


def attend(case: LatentCase) -> torch.Tensor:
    return ops.latent_attention(*case.arguments(), scale=SCALE, backend="cuda")


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("num_heads", [16, 20, 64, 128])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1], [8191]),
        ([1] * 48, range(1, 4800, 100)),
        ([4, 1, 7, 1, 0, 64], [500, 63, 7, 0, 5, 1111]),
        ([1] * 64, [0, *range(1, 1300, 65), *[0] * 43]),
        ([1] * 300, [0] * 300),
    ],
    ids=["one", "long", "uneven", "mixed", "padded", "padding"],
)
def test_the_kernel_is_right(num_heads, query_lens, seq_lens, is_fp8) -> None:
    device = hopper_device()
    for has_tree in (False, True):
        case = make_case(query_lens, list(seq_lens), num_heads, has_tree=has_tree, is_fp8=is_fp8, device=device)
        case = steep(case) if has_tree and not is_fp8 else case
        rtol, atol = ATTENTION[torch.bfloat16]
        first, again = attend(case), attend(case)
        torch.testing.assert_close(first.double().cpu(), dense_latent_attention(case, SCALE), rtol=rtol, atol=atol)
        assert torch.equal(first, again)
