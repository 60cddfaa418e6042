"""Prefill attention in CUDA: right against the dense fp64 oracle where there is a Hopper GPU.

Everywhere: what the compiler makes of it, and what is chosen.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decode_cases import FP8, make_case, oracle
from dense_attention import PagedBatch, dense_attention, make_batch
from hopper import assert_compiles_well
from slipstream_kernels import ops
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import prefill_attention as cuda_prefill
from slipstream_kernels.attention.cuda import prefill_stage
from slipstream_kernels.attention.paged_attention import paged_attention
from slipstream_kernels.cuda import build
from tolerances import ATTENTION

# Around the edges of tiles (128 rows of tokens x heads, 128 keys) and blocks; single tokens, chunks, padding.
EDGES = ([1, 31, 32, 33, 127, 128, 129, 5, 30, 1], [1, 31, 32, 33, 127, 128, 129, 200, 257, 0])
# num_q_heads, num_kv_heads, head_dim, block_size
GEOMETRIES = [
    (4, 4, 64, 16), (8, 2, 128, 64), (8, 1, 64, 128), (5, 1, 128, 32), (6, 2, 128, 256), (4, 2, 80, 16),
    (4, 4, 80, 64), (8, 2, 96, 64), (3, 3, 96, 16), (4, 4, 256, 16), (8, 2, 256, 64), (5, 1, 256, 128),
]  # fmt: skip
OPTIONS = {
    "window": {"sliding_window": 100},
    "narrow window": {"sliding_window": 1},
    "alibi": {"alibi_slopes": True},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "sinks and window": {"sliding_window": 128, "sinks": True},
    "all": {"sliding_window": 40, "alibi_slopes": True, "soft_cap": 5.0, "sinks": True},
}


@pytest.mark.parametrize(
    "kv, head_dim",
    [
        (0, 64),
        (0, 96),
        (0, 128),
        (0, 256),
        (2, 128),
        (2, 256),
        (cuda_prefill.FP8_KEYS, 128),
        (cuda_prefill.ALL_FP8, 128),
    ],
)
def test_compiles_without_spills_or_serialised_products(kv, head_dim) -> None:
    assert_compiles_well(cuda_prefill.SOURCE, cuda_prefill.variant(torch.bfloat16, kv, head_dim))


def test_blocks_are_staged_for_long_prompts_of_quantised_caches() -> None:
    """Also long chunks after a prefix; not short ones, nor where the prefixes would be most of the copy."""

    def stages(query_len: int, seq_len: int, count: int = 1, kv_dtype: torch.dtype = FP8) -> bool:
        blocks = -(-seq_len // 64)
        cache = torch.empty(1, 8, 64, 128, dtype=kv_dtype, device="meta")
        batch = PagedBatch(
            torch.empty(count * query_len, 32, 128, dtype=torch.bfloat16, device="meta"),
            cache,
            cache,
            torch.empty(count, blocks, dtype=torch.int32, device="meta"),
            torch.empty(count + 1, dtype=torch.int32, device="meta"),
            torch.empty(count, dtype=torch.int32, device="meta"),
            query_len,
            seq_len,
        )
        return prefill_stage.pays(call_of(batch), with_keys=False)

    assert stages(4096, 4096) and stages(2048, 32768) and stages(2048, 2048, count=8)
    assert not stages(1024, 1024) and not stages(256, 32768) and not stages(100, 100, count=64)
    assert not stages(2048, 262144)
    assert not stages(4096, 4096, kv_dtype=torch.bfloat16)


def test_refusal_says_why() -> None:
    batch = make_batch([3], [3], 2, 1, 64, 16, torch.bfloat16, torch.device("cpu"))
    assert cuda_prefill.refusal(call_of(batch)) == "q is on cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda cannot run"):
            paged_attention(*batch.arguments(), backend="cuda")


def test_int4_rows_that_the_copy_engine_cannot_read_are_refused(hopper) -> None:
    case = make_case([33], [33], (4, 2, 80, 64), torch.bfloat16, torch.uint8, seed=9).to(hopper)
    with pytest.raises(ValueError, match="rows of int4 with 80 features do not begin at multiples of 16 bytes"):
        paged_attention(*case.arguments(), backend="cuda")


def call_of(batch: PagedBatch, options: dict | None = None) -> AttentionCall:
    """Into a poisoned output: every row must be written."""
    return AttentionCall(*batch.arguments(**(options or {})), torch.full_like(batch.q, float("nan")))


def stage_always(monkeypatch) -> None:
    monkeypatch.setattr(prefill_stage, "MIN_QUERY_LEN", 0)
    monkeypatch.setattr(prefill_stage, "MAX_RATIO", 1 << 20)


def with_vectors(options: dict, batch: PagedBatch) -> dict:
    num_heads, device = batch.q.shape[1], batch.q.device
    slopes = (2.0 ** (-8 * torch.arange(1, num_heads + 1, device=device) / num_heads)).float()
    vectors = {"alibi_slopes": slopes, "sinks": torch.linspace(-1, 3, num_heads, device=device)}
    return options | {name: vector for name, vector in vectors.items() if name in options}


def assert_right(batch: PagedBatch, options: dict) -> None:
    call = call_of(batch, with_vectors(options, batch))
    assert cuda_prefill.refusal(call) is None
    cuda_prefill.paged_attention(call)
    rtol, atol = ATTENTION[call.q.dtype]
    expected = dense_attention(batch, call.options.scale, **with_vectors(options, batch))
    torch.testing.assert_close(call.out.cpu().double(), expected, rtol=rtol, atol=atol)
    again = replace(call, out=torch.full_like(call.out, float("nan")))
    cuda_prefill.paged_attention(again)
    assert torch.equal(again.out, call.out)


@pytest.mark.parametrize("dtype", cuda_prefill.TYPES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_edges_of_tiles_and_blocks(hopper, geometry, dtype) -> None:
    """make_batch leaves NaN in every slot no request owns."""
    assert_right(make_batch(*EDGES, *geometry, dtype, hopper, seed=1), {})


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("head_dim", cuda_prefill.HEAD_DIMS)
def test_options(hopper, head_dim, option) -> None:
    batch = make_batch([300, 77, 1], [420, 77, 300], 8, 2, head_dim, 64, torch.bfloat16, hopper, seed=2)
    assert_right(batch, OPTIONS[option])


@pytest.mark.parametrize("is_staged", [False, True], ids=["converted in the kernel", "staged"])
@pytest.mark.parametrize("kv_dtype", [FP8, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "geometry",
    [(8, 2, 128, 64), (4, 4, 64, 16), (5, 1, 128, 128), (4, 2, 96, 64), (4, 2, 256, 64), (5, 1, 256, 16)],
    ids=str,
)
def test_quantised_caches(hopper, geometry, kv_dtype, is_staged, monkeypatch) -> None:
    """make_case leaves NaN, where a type has it, in every slot and scale that no request owns."""
    if is_staged:
        stage_always(monkeypatch)
    dtype = torch.float16 if geometry[1] == 1 else torch.bfloat16
    case = make_case([33, 129, 5, 1], [33, 190, 200, 0], geometry, dtype, kv_dtype, seed=7)
    moved = case.to(hopper)
    out = torch.full_like(moved.q, float("nan"))
    paged_attention(*moved.arguments(), out=out, backend="cuda")
    rtol, atol = ATTENTION[dtype]
    torch.testing.assert_close(out.cpu().double(), oracle(case), rtol=rtol, atol=atol)


@pytest.mark.parametrize("geometry", [(8, 2, 128, 64), (5, 1, 128, 16)], ids=str)
@pytest.mark.parametrize("dtype", cuda_prefill.TYPES, ids=str)
def test_rounded_queries_are_all_that_fp8_queries_change(hopper, geometry, dtype, monkeypatch) -> None:
    """Against the oracle over queries rounded as the kernel does: each head of a token by its largest element."""
    stage_always(monkeypatch)
    case = make_case([33, 129, 5, 1], [33, 190, 200, 0], geometry, dtype, FP8, seed=8)
    moved = case.to(hopper)
    out = torch.full_like(moved.q, float("nan"))
    paged_attention(*moved.arguments(fp8_queries=True), out=out, backend="cuda")
    unit = case.q.float().abs().amax(-1, keepdim=True) / 448
    inverse = torch.ones_like(unit) / unit  # multiplied, as there: ties fall alike
    rounded = (case.q.float() * inverse).to(FP8).float() * unit
    rtol, atol = ATTENTION[dtype]
    torch.testing.assert_close(out.cpu().double(), oracle(replace(case, q=rounded)), rtol=rtol, atol=atol)
    exact = oracle(case)
    assert 0.002 < (out.cpu().double() - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("dtype", cuda_prefill.TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_follow_scores_that_rise(hopper, head_dim, dtype) -> None:
    """Scores 16 times as large: of many tiles the largest lies far above those of the tiles before."""
    batch = make_batch([1, 301, 40], [900, 301, 2000], 8, 2, head_dim, 64, dtype, hopper, seed=7)
    assert_right(replace(batch, q=batch.q * 16), {})


def test_many_requests_share_the_tiles(hopper) -> None:
    query_lens = [37 * i % 90 + 1 for i in range(70)]
    seq_lens = [length + 91 * i % 130 for i, length in enumerate(query_lens)]
    assert_right(make_batch(query_lens, seq_lens, 4, 1, 64, 16, torch.bfloat16, hopper, seed=3), {})


def test_long_prompt_of_many_tiles(hopper) -> None:
    """More work than CTAs: tiles are handed out, and the rings go round many times."""
    generator = torch.Generator(device=hopper).manual_seed(4)
    num_tokens, num_q_heads, num_kv_heads, dim = 2500, 32, 8, 128
    q, k, v = (
        torch.randn(num_tokens, heads, dim, generator=generator, device=hopper).bfloat16()
        for heads in (num_q_heads, num_kv_heads, num_kv_heads)
    )
    num_blocks = -(-num_tokens // 64)
    order = torch.randperm(num_blocks, generator=generator, device=hopper)
    caches = []
    for rows in (k, v):
        padded = torch.full((num_blocks * 64, num_kv_heads, dim), float("nan"), device=hopper, dtype=q.dtype)
        padded[:num_tokens] = rows
        cache = torch.empty(num_blocks, num_kv_heads, 64, dim, device=hopper, dtype=q.dtype)
        cache[order] = padded.view(num_blocks, 64, num_kv_heads, dim).transpose(1, 2)
        caches.append(cache)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=hopper)
    batch = PagedBatch(q, *caches, order.int()[None], starts, starts[1:], num_tokens, num_tokens)
    call = call_of(batch)
    cuda_prefill.paged_attention(call)
    for head in (0, 13, 31):
        scores = q[:, head].double() @ k[:, head // 4].double().T * call.options.scale
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        rtol, atol = ATTENTION[q.dtype]
        expected = scores.softmax(-1) @ v[:, head // 4].double()
        torch.testing.assert_close(call.out[:, head].double(), expected, rtol=rtol, atol=atol)
    assert call.out.isfinite().all()


def test_does_not_depend_on_the_batch_or_on_chunks(hopper) -> None:
    """Bit for bit: a prompt alone, in company, and in chunks of odd lengths."""
    batch = make_batch([1, 301, 40], [100, 301, 90], 8, 2, 128, 64, torch.bfloat16, hopper, seed=5)
    together = call_of(batch)
    cuda_prefill.paged_attention(together)
    start = 0
    for size in (133, 1, 100, 67):
        starts = torch.tensor([0, size], dtype=torch.int32, device=hopper)
        end = torch.tensor([start + size], dtype=torch.int32, device=hopper)
        chunk = replace(
            together,
            q=batch.q[1 + start : 1 + start + size],
            out=torch.empty_like(batch.q[:size]),
            metadata=ops.AttentionMetadata(batch.block_tables[1:2], starts, end, size, batch.max_seq_len),
        )
        cuda_prefill.paged_attention(chunk)
        assert torch.equal(chunk.out, together.out[1 + start : 1 + start + size])
        start += size


@pytest.fixture(scope="module")
def splits_check(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("splits") / "check"
    source = root / "tests" / "kernels" / "prefill_splits_check.cc"
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run([compiler, *flags, f"-I{build.DEVICE_CODE}", str(source), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(
    ("num_items", "num_sms", "num_whole", "num_splits"),
    [
        (8, 132, 0, 8),
        (32, 132, 0, 4),
        (40, 132, 0, 3),
        (64, 132, 0, 2),
        (88, 132, 0, 3),  # two waves of thirds
        (130, 132, 130, 1),
        (132, 132, 132, 1),
        (176, 132, 132, 3),
        (1024, 132, 1024, 1),  # 100 in the last wave
        (7 * 132 + 44, 132, 7 * 132, 3),
        (0, 132, 0, 1),
        (30, 16, 30, 1),
        (36, 16, 32, 4),
    ],
)
def test_keys_are_split_in_a_last_wave_that_is_not_full(
    num_items: int, num_sms: int, num_whole: int, num_splits: int, splits_check: Path
) -> None:
    done = subprocess.run([splits_check, str(num_items), str(num_sms)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{num_whole} {num_splits}\n"


@pytest.mark.parametrize("option", ["window", "all", "none"])
@pytest.mark.parametrize(
    "kv_dtype, head_dim",
    [(torch.bfloat16, 128), (FP8, 128), (torch.int8, 128), (torch.bfloat16, 96), (torch.bfloat16, 256), (FP8, 256)],
    ids=str,
)
def test_split_keys_are_added_up(hopper, kv_dtype, head_dim, option) -> None:
    """Chunks after prefixes of many tiles, after short ones, padding; the same bits from run to run."""
    queries, lengths = [70, 33, 1, 20], [4700, 900, 2500, 0]
    case = make_case(queries, lengths, (8, 2, head_dim, 64), torch.bfloat16, kv_dtype, seed=11)
    moved = case.to(hopper)
    slopes = torch.full((8,), 0.01, device=hopper)
    sinks = torch.linspace(-1, 3, 8, device=hopper)
    all_options = {"sliding_window": 4000, "alibi_slopes": slopes, "soft_cap": 5.0, "sinks": sinks}
    chosen = {"window": {"sliding_window": 3000, "sinks": sinks}, "all": all_options, "none": {}}[option]
    arguments = moved.arguments(max_seq_len=4700, **chosen)
    out = paged_attention(*arguments, backend="cuda")
    assert torch.equal(out, paged_attention(*arguments, backend="cuda"))
    plain = paged_attention(*arguments, backend="triton")
    rtol, atol = ATTENTION[torch.bfloat16]
    torch.testing.assert_close(out[: sum(queries[:3])], plain[: sum(queries[:3])], rtol=2 * rtol, atol=2 * atol)
    assert (out[sum(queries[:3]) :] == 0).all()


def test_splits_do_not_depend_on_the_capacity_of_a_graph(hopper) -> None:
    """Bit for bit: a chunk after a long prefix alone, and before padding requests of a token or none."""
    case = make_case([128, 1, 1, 0], [5000, 0, 0, 0], (32, 8, 128, 64), torch.bfloat16, FP8, seed=12).to(hopper)
    tables, starts, seq_lens = case.block_tables[:1], case.query_start_loc[:2], case.seq_lens[:1]
    alone = replace(case, q=case.q[:128], block_tables=tables, query_start_loc=starts, seq_lens=seq_lens)
    padded, expected = (paged_attention(*of.arguments(max_seq_len=8192), backend="cuda") for of in (case, alone))
    assert torch.equal(padded[:128], expected)
    assert (padded[128:] == 0).all()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
def test_a_last_wave_is_split(hopper, kv_dtype) -> None:
    """Tiles of more than one wave: 44 of 176 are shared by several CTAs each, on 132 SMs."""
    case = make_case([698], [6000], (32, 8, 128, 64), torch.bfloat16, kv_dtype, seed=13).to(hopper)
    arguments = case.arguments(max_seq_len=6000)
    out = paged_attention(*arguments, backend="cuda")
    assert torch.equal(out, paged_attention(*arguments, backend="cuda"))
    plain = paged_attention(*arguments, backend="triton")
    rtol, atol = ATTENTION[torch.bfloat16]
    torch.testing.assert_close(out, plain, rtol=2 * rtol, atol=2 * atol)


def test_auto_takes_it_for_prompts_and_mixed_steps(hopper) -> None:
    batch = make_batch([1, 40, 1, 70], [100, 40, 70, 90], 4, 2, 64, 16, torch.bfloat16, hopper, seed=6)
    out = paged_attention(*batch.arguments())
    rtol, atol = ATTENTION[batch.q.dtype]
    torch.testing.assert_close(out.cpu().double(), dense_attention(batch, 0.125), rtol=rtol, atol=atol)
