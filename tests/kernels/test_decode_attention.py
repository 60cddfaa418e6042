"""Decode attention: the reference against a row-by-row fp64 oracle, CUDA against the reference, write against read.

Without a GPU the CUDA source is still compiled for sm_90a.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import FP8, DecodeCase, chain_or_tree, make_case, oracle
from slipstream_kernels import ops
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import decode_attention as cuda_decode
from slipstream_kernels.attention.cuda import verify_attention as cuda_verify
from slipstream_kernels.attention.decode_attention import decode_attention
from slipstream_kernels.cuda import build
from tolerances import ATTENTION

KV_TYPES = {"bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8, "int4": torch.uint8}
# num_q_heads, num_kv_heads, head_dim, block_size
GEOMETRIES = [(6, 2, 64, 16), (3, 3, 80, 32), (5, 1, 96, 16), (8, 2, 128, 64), (2, 1, 256, 16)]
DECODE = ([1, 1, 1, 1], [70, 1, 16, 0])
VERIFY = ([5, 1, 7, 0, 12], [75, 33, 7, 0, 40])
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "alibi": {"alibi_slopes": True},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 20, "alibi_slopes": True, "soft_cap": 5.0, "sinks": True},
}


def with_options(case: DecodeCase, name: str) -> DecodeCase:
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 3, case.q.shape[1])
    if "alibi_slopes" in options:
        num_heads = case.q.shape[1]
        options["alibi_slopes"] = (2.0 ** (-8 * torch.arange(1, num_heads + 1) / num_heads)).float()
    return replace(case, options={**case.options, **options})


def attend(case: DecodeCase, backend: str) -> torch.Tensor:
    """Into a poisoned output: every row of a request must be written."""
    out = torch.full_like(case.q, float("nan"))
    return decode_attention(*case.arguments(), out=out, backend=backend)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kv", KV_TYPES)
def test_reference_is_right(kv, option) -> None:
    kv_dtype = torch.float32 if kv == "bf16" else KV_TYPES[kv]
    for case in (
        make_case(*DECODE, GEOMETRIES[0], torch.float32, kv_dtype),
        chain_or_tree(make_case(*VERIFY, GEOMETRIES[1], torch.float32, kv_dtype, seed=1)),
        make_case(*VERIFY, GEOMETRIES[2], torch.float32, kv_dtype, seed=2),
    ):
        case = with_options(case, option)
        rtol, atol = ATTENTION[torch.float32]
        torch.testing.assert_close(attend(case, "reference").double(), oracle(case), rtol=rtol, atol=atol)


def test_tree_of_64_rows_uses_every_bit() -> None:
    case = chain_or_tree(make_case([64], [70], (2, 1, 64, 16), torch.float32), seed=3)
    assert bool((case.options["tree_mask"] < 0).any())
    rtol, atol = ATTENTION[torch.float32]
    torch.testing.assert_close(attend(case, "reference").double(), oracle(case), rtol=rtol, atol=atol)


def test_chain_tree_equals_causal() -> None:
    causal = make_case(*VERIFY, GEOMETRIES[0], torch.float32, FP8)
    rows = torch.cat([torch.arange(n) for n in VERIFY[0]])
    tree = replace(causal, options={**causal.options, "tree_mask": (2 << rows) - 1})
    torch.testing.assert_close(attend(tree, "reference"), attend(causal, "reference"))


@pytest.mark.parametrize("kv", ["fp8", "int8", "int4"])
def test_written_kv_reads_back(kv) -> None:
    """Attention over a cache that rope_write_kv filled is attention over the values, within the type's step."""
    case = make_case([1], [37], (4, 2, 64, 16), torch.float32, KV_TYPES[kv], seed=5)
    generator = torch.Generator().manual_seed(6)
    k, v = torch.randn(2, 37, 2, 64, generator=generator)
    positions = torch.arange(37)
    slots = case.block_tables[0, positions // 16].long() * 16 + positions % 16
    k, v, slots = torch.cat([k, k[:1]]), torch.cat([v, v[:1]]), torch.cat([slots, torch.tensor([-1])])
    ops.rope_write_kv(k, k, v, ops.TokenSlots(slots, slots), ops.QKRope(None), case.cache)
    group = case.q.view(2, 2, 64)
    scores = torch.einsum("hgd,khd->hgk", group, k[:37]) / 8
    expected = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v[:37]).reshape(1, 4, 64)
    error = (attend(case, "reference") - expected).norm() / expected.norm()
    assert error < {"fp8": 0.05, "int8": 0.02, "int4": 0.25}[kv]


def test_refuses_what_it_cannot_take() -> None:
    case = make_case(*DECODE, GEOMETRIES[0], torch.float32, torch.int8)
    with pytest.raises(ValueError, match="max_query_len"):
        decode_attention(*case.arguments(max_query_len=65))
    with pytest.raises(ValueError, match="key_scale"):
        decode_attention(*case.arguments(key_scale=None))
    with pytest.raises(ValueError, match="positions"):
        decode_attention(*case.arguments(positions=torch.zeros(4, dtype=torch.int64)))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda cannot run"):
            decode_attention(*case.arguments(), backend="cuda")


def test_missing_compiler_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(build.KernelBuildError, match="nvidia-cuda-nvcc"):
        build.build(cuda_decode.SOURCE, ["NEVER_BUILT"], tmp_path)
    assert "nvcc is not installed" in (build.missing(cuda_decode.SOURCE, ("NEVER_BUILT",)) or "")


def test_cache_folder_that_cannot_be_made_is_named(tmp_path) -> None:
    if build.find_nvcc() is None:
        pytest.skip("no nvcc")
    (tmp_path / "file").write_text("")
    with pytest.raises(build.KernelBuildError, match="cannot hold built kernels"):
        build.build(cuda_decode.SOURCE, ["NEVER_BUILT"], tmp_path / "file" / "below")


def test_compiles_for_hopper_and_is_cached(tmp_path) -> None:
    if build.find_nvcc() is None:
        pytest.skip("no nvcc")
    defines = cuda_decode.defines(torch.bfloat16, FP8, 128)
    library = build.build(cuda_decode.SOURCE, defines, tmp_path)
    assert library.stat().st_size > 0
    written = library.stat().st_mtime_ns
    assert build.build(cuda_decode.SOURCE, defines, tmp_path) == library
    assert library.stat().st_mtime_ns == written, "built again although nothing changed"
    with pytest.raises(build.KernelBuildError, match="SLIPSTREAM_QUERY"):
        build.build(cuda_decode.SOURCE, ["SLIPSTREAM_QUERY"], tmp_path)


def assert_cuda_right(case: DecodeCase, device: torch.device) -> None:
    case = case.to(device)
    out, expected = attend(case, "cuda"), attend(case, "reference")
    used = int(case.query_start_loc[-1])
    rtol, atol = ATTENTION[case.q.dtype]
    torch.testing.assert_close(out[:used], expected[:used], rtol=rtol, atol=atol)
    # A second call finds the workspace as the first left it, and repeats it bit for bit.
    assert torch.equal(attend(case, "cuda")[:used], out[:used])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kv", KV_TYPES)
def test_cuda_every_type_and_head_dim(hopper, kv, geometry) -> None:
    for seed, option in enumerate(OPTIONS):
        for lens in (DECODE, VERIFY, ([1, 3], [700, 1301])):
            case = make_case(*lens, geometry, torch.bfloat16, KV_TYPES[kv], seed)
            assert_cuda_right(with_options(case, option), hopper)
            assert_cuda_right(with_options(chain_or_tree(case, seed), option), hopper)


@pytest.mark.parametrize("kv", KV_TYPES)
def test_cuda_fp16_queries(hopper, kv) -> None:
    for geometry in (GEOMETRIES[0], GEOMETRIES[3]):
        kv_dtype = torch.float16 if kv == "bf16" else KV_TYPES[kv]
        assert_cuda_right(make_case(*VERIFY, geometry, torch.float16, kv_dtype, seed=7), hopper)


@pytest.mark.parametrize("kv", KV_TYPES)
def test_cuda_heads_of_gpt_oss(hopper, kv) -> None:
    """64 heads of 64, eight to a kv head, with sinks, and the window of 128 of every other layer: one row and several,
    requests that one CTA has and such as share their keys."""
    sinks = torch.linspace(-4, 6, 64)
    for seed, lens in enumerate((([1] * 9, [3000, 1, 129, 128, 127, 700, 0, 64, 2000]), ([5, 3], [900, 3]))):
        case = make_case(*lens, (64, 8, 64, 64), torch.bfloat16, KV_TYPES[kv], seed)
        for window in ({}, {"sliding_window": 128}):
            assert_cuda_right(replace(case, options={**case.options, **window, "sinks": sinks}), hopper)


def test_cuda_sinks_far_from_the_scores(hopper) -> None:
    """A sink above all scores takes everything; one below them takes nothing, not even as a NaN."""
    case = make_case([1, 1], [700, 0], (8, 1, 64, 64), torch.bfloat16)
    plain = attend(case.to(hopper), "cuda")
    for sink, expected in ((-1e4, plain), (float("-inf"), plain), (1e4, torch.zeros_like(plain))):
        sunk = replace(case, options={**case.options, "sinks": torch.full((8,), sink)})
        torch.testing.assert_close(attend(sunk.to(hopper), "cuda"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kv", KV_TYPES)
def test_cuda_odd_batches(hopper, kv) -> None:
    """Random lengths from 1 to 3000 in batches of many sizes: every way that the line of tiles can be cut."""
    generator = torch.Generator().manual_seed(11)
    geometries = {1: (8, 1, 128, 64), 3: (4, 4, 128, 16), 33: (8, 2, 128, 32), 70: (6, 1, 64, 16)}
    for num_requests, geometry in geometries.items():
        seq_lens = torch.randint(1, 3000 if num_requests < 40 else 300, (num_requests,), generator=generator).tolist()
        query_lens = [min(n, int(torch.randint(0, 9, (1,), generator=generator))) for n in seq_lens]
        query_lens[0] = 1
        case = make_case(query_lens, seq_lens, geometry, torch.bfloat16, KV_TYPES[kv], seed=num_requests)
        assert_cuda_right(case, hopper)
        assert_cuda_right(chain_or_tree(case), hopper)


@pytest.mark.parametrize("kv", KV_TYPES)
def test_cuda_padding_of_graphs(hopper, kv) -> None:
    """Requests without tokens behind the others, between them, and alone: zeros, of one row each or of none."""
    for seed, lens in enumerate(
        (([1] * 64, [*range(1, 1300, 65), *[0] * 44]), ([1, 1, 0, 2, 1], [0, 900, 0, 0, 33]), ([1] * 300, [0] * 300))
    ):
        for geometry in ((8, 2, 128, 64), (6, 1, 80, 16)):
            case = make_case(*lens, geometry, torch.bfloat16, KV_TYPES[kv], seed)
            assert_cuda_right(case, hopper)
            of_tokens = torch.tensor(lens[1]).repeat_interleave(torch.tensor(lens[0]))
            assert not attend(case.to(hopper), "cuda").cpu()[of_tokens == 0].any()


@pytest.mark.parametrize("factor", [1e-3, 30.0])
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_cuda_keeps_digits_of_small_and_large_values(hopper, kv, factor) -> None:
    """Value scales enter the products in fp16: neither 0.001 nor 30 times the usual may cost digits."""
    case = make_case([1, 4], [600, 33], (8, 2, 128, 64), torch.float16, KV_TYPES[kv], seed=8).to(hopper)
    scaled = replace(case, options={**case.options, "value_scale": case.options["value_scale"] * factor})
    out, expected = (attend(scaled, backend).float() / factor for backend in ("cuda", "reference"))
    rtol, atol = ATTENTION[torch.float16]
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


def test_cuda_tree_of_64_rows(hopper) -> None:
    for kv_dtype in KV_TYPES.values():
        case = chain_or_tree(make_case([64, 1, 64], [64, 900, 1500], (8, 2, 128, 64), torch.bfloat16, kv_dtype), seed=3)
        assert_cuda_right(case, hopper)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_many_rows(hopper, dtype, kv_dtype) -> None:
    """More rows of a kv head than a pass of the kernel for few takes: keys shared by 2 to 16 CTAs, requests beside each
    other that have fewer, none, or nothing in the cache."""
    lens = {
        (8, 2, 128, 64): ([64, 49, 0, 21, 33], [1500, 49, 0, 700, 64]),
        (4, 4, 128, 16): ([64], [64]),
        (16, 2, 128, 32): ([27, 64, 5], [3000, 65, 129]),
        (6, 2, 128, 64): ([12] * 40, [40 + 97 * place for place in range(40)]),
        (32, 8, 128, 16): ([10, 3, 9, 9] * 18, [11 + 41 * place for place in range(72)]),
        (8, 2, 128, 32): ([4, 3, 4], [1500, 3, 700]),
        (32, 8, 128, 64): ([64], [1088]),
    }
    for seed, (geometry, (query_lens, seq_lens)) in enumerate(lens.items()):
        case = make_case(query_lens, seq_lens, geometry, dtype, kv_dtype, seed)
        for one in (case, chain_or_tree(case, seed)):
            assert cuda_verify.takes(call_of(one.to(hopper)))
            assert_cuda_right(one, hopper)


def test_many_rows_are_taken_where_the_kernel_has_all_that_they_ask(monkeypatch) -> None:
    monkeypatch.setattr(cuda_verify, "build_refusal", lambda *arguments: None)
    monkeypatch.setattr(cuda_verify, "count_clusters", lambda *arguments: {2: 132, 4: 62, 8: 30, 16: 14})
    geometry = (8, 2, 128, 64)

    def takes(query_lens, kv_dtype=None, geometry=geometry, option="plain") -> bool:
        case = make_case(query_lens, [max(query_lens) + 3] * len(query_lens), geometry, kv_dtype=kv_dtype)
        return cuda_verify.takes(call_of(with_options(case, option)))

    assert takes([12]) and takes([4, 2]) and takes([4] * 66) and takes([9] * 200)
    assert not takes([4] * 67), "what fits into a pass of the other kernel, and not twice on the GPU"
    assert takes([12], FP8) and takes([9] * 200, FP8) and takes([4] * 31, FP8) and not takes([4] * 32, FP8)
    assert not takes([2]) and not takes([1] * 8, geometry=(32, 1, 128, 64)), "few rows, decodes"
    assert not takes([12], torch.int8) and not takes([64], geometry=(2, 2, 64, 16))
    assert not takes([64, *[1] * 20]), "a short prompt is not what the others have"
    assert not any(takes([12], option=option) for option in ("window", "alibi", "soft_cap", "sinks"))


def test_keys_are_shared_by_as_many_as_there_is_room_for(monkeypatch) -> None:
    monkeypatch.setattr(cuda_verify, "count_clusters", lambda *arguments: {2: 132, 4: 62, 8: 30, 16: 14})
    for num_requests, splits in ((1, 16), (7, 16), (8, 8), (15, 8), (16, 4), (31, 4), (32, 2), (66, 2), (67, 0)):
        case = make_case([12] * num_requests, [12] * num_requests, (8, 2, 128, 64))
        assert cuda_verify._splits(call_of(case)) == splits


def call_of(case: DecodeCase) -> AttentionCall:
    return AttentionCall(*case.arguments(), torch.empty_like(case.q))


def test_cuda_graph_replays_with_new_lengths(hopper) -> None:
    """A captured launch follows seq_lens and block tables as they change on the device."""
    for num_rows, kv_dtype in ((1, FP8), (12, FP8), (12, torch.bfloat16)):
        check_replays(hopper, num_rows, kv_dtype)


def check_replays(hopper, num_rows, kv_dtype) -> None:
    lens, geometry = [900, 64, 12, 129, 2000], (8, 2, 128, 64)
    case = make_case([num_rows] * 5, [12] * 5, geometry, torch.bfloat16, kv_dtype).to(hopper)
    long = make_case([num_rows] * 5, lens, geometry, torch.bfloat16, kv_dtype, seed=1).to(hopper)
    lengths = torch.ones_like(long.seq_lens)
    live = replace(long, seq_lens=lengths)
    out = attend(live, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*live.arguments(), out=out, backend="cuda")
    for lens in (long.seq_lens, case.seq_lens):
        lengths.copy_(lens)
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, attend(live, "cuda"), rtol=0, atol=0)
        rtol, atol = ATTENTION[out.dtype]
        torch.testing.assert_close(out, attend(live, "reference"), rtol=rtol, atol=atol)


def test_ops_exports_it() -> None:
    assert ops.decode_attention is decode_attention
