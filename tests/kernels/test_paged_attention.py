"""Paged attention: right against a dense fp64 oracle, the same whatever the batch and however the prompt is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import make_case, oracle
from dense_attention import PagedBatch, dense_attention, make_batch
from slipstream_kernels import ops
from slipstream_kernels.kv_cache import QUANTIZED_DTYPES
from tolerances import ATTENTION

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["reference", "triton"]
# (query_lens, seq_lens): decode only; prompt, chunk after prefix, drafts, decode and padding together.
DECODE = ([1, 1, 1], [70, 1, 17])
MIXED = ([1, 21, 3, 1, 18, 0], [40, 21, 33, 0, 50, 0])
# num_q_heads, num_kv_heads, head_dim, block_size
GEOMETRIES = [(6, 2, 64, 16), (2, 2, 80, 32), (5, 1, 96, 16), (4, 2, 128, 64), (2, 1, 256, 16)]
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "alibi": {"alibi_slopes": True},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 20, "alibi_slopes": True, "soft_cap": 5.0, "sinks": True},
}


def attend(batch: PagedBatch, backend: str, out: torch.Tensor | None = None, **options) -> torch.Tensor:
    return ops.paged_attention(*batch.arguments(**options), out=out, backend=backend)


def with_slopes(options: dict, batch: PagedBatch) -> dict:
    num_heads = batch.q.shape[1]
    if "sinks" in options:
        options = {**options, "sinks": torch.linspace(-1, 3, num_heads, device=batch.q.device)}
    if "alibi_slopes" not in options:
        return options
    slopes = 2.0 ** (-8 * torch.arange(1, num_heads + 1, device=batch.q.device) / num_heads)
    return {**options, "alibi_slopes": slopes.float()}


def assert_right(batch: PagedBatch, backend: str, options: dict, **choices) -> None:
    options = with_slopes(options, batch)
    out = attend(batch, backend, **options, **choices)
    rtol, atol = ATTENTION[out.dtype]
    expected = dense_attention(batch, batch.q.shape[-1] ** -0.5, **options)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_batch_of_every_geometry(device, backend, geometry) -> None:
    for dtype in DTYPES:
        assert_right(make_batch(*MIXED, *geometry, dtype, device), backend, {})


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_options(device, backend, option) -> None:
    for lens in (DECODE, MIXED):
        batch = make_batch(*lens, 6, 2, 64, 16, torch.float32, device, seed=1)
        assert_right(batch, backend, OPTIONS[option])


@pytest.mark.parametrize("num_kv_splits", [1, 2, 5])
def test_split_keys_merge_to_the_same(device, num_kv_splits) -> None:
    for option in ("plain", "all"):
        batch = make_batch([1, 2, 1, 1], [70, 33, 3, 0], 6, 2, 64, 16, torch.bfloat16, device, seed=2)
        assert_right(batch, "triton", OPTIONS[option], num_kv_splits=num_kv_splits)


def test_long_context_is_split_by_default(device) -> None:
    """Two programs for one request of 600 tokens: the path that a lone long request takes."""
    batch = make_batch([1], [600], 2, 1, 64, 64, torch.float32, device, seed=3)
    assert_right(batch, "triton", {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_does_not_depend_on_the_batch(device, dtype) -> None:
    """Bit for bit: the same engine text alone or in company."""
    query_lens, seq_lens = [1, 1, 3, 20, 1, 1, 3, 1], [70, 5, 33, 44, 128, 129, 40, 200]
    batch = make_batch(query_lens, seq_lens, 6, 2, 64, 16, dtype, device, seed=4)
    together = attend(batch, "reference")
    for request in range(len(seq_lens)):
        start, stop = batch.query_start_loc[request : request + 2].tolist()
        own = slice(request, request + 1)
        alone = replace(
            batch,
            q=batch.q[start:stop],
            block_tables=batch.block_tables[own],
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
            seq_lens=batch.seq_lens[own],
            max_query_len=stop - start,
        )
        assert torch.equal(attend(alone, "reference"), together[start:stop]), request


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunked_is_whole(device, backend) -> None:
    whole = make_batch([37], [37], 4, 2, 64, 16, torch.float32, device, seed=5)
    expected, start = attend(whole, backend), 0
    for size in (20, 1, 9, 7):
        stop = start + size
        chunk = PagedBatch(
            q=whole.q[start:stop],
            key_cache=whole.key_cache,
            value_cache=whole.value_cache,
            block_tables=whole.block_tables,
            query_start_loc=torch.tensor([0, size], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([stop], dtype=torch.int32, device=device),
            max_query_len=size,
            max_seq_len=stop,
        )
        rtol, atol = ATTENTION[torch.float32]
        torch.testing.assert_close(attend(chunk, backend), expected[start:stop], rtol=rtol, atol=atol)
        start = stop


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_former_owners_nan_does_not_leak(device, backend) -> None:
    """make_batch leaves NaN in every slot no request owns, the rest of partly filled blocks included."""
    batch = make_batch([1, 2, 19], [5, 18, 19], 2, 1, 64, 16, torch.float32, device)
    assert batch.key_cache.isnan().any()
    assert attend(batch, backend).isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_a_view_of_fused_qkv_and_writes_out(device, backend) -> None:
    batch = make_batch([1, 18], [9, 30], 4, 2, 64, 16, torch.float32, device)
    fused = torch.randn(19, 8, 64, device=device)
    fused[:, 2:6] = batch.q
    out = torch.empty_like(batch.q)
    view = PagedBatch(**{**batch.__dict__, "q": fused[:, 2:6]})
    assert attend(view, backend, out=out) is out
    assert torch.equal(out, attend(batch, backend))


@pytest.mark.parametrize(
    ("kv_dtype", "geometry"),
    [
        (torch.float8_e4m3fn, GEOMETRIES[1]),
        (torch.float8_e4m3fn, GEOMETRIES[3]),
        (torch.int8, GEOMETRIES[0]),
        (torch.int8, GEOMETRIES[2]),
        (torch.uint8, GEOMETRIES[1]),
        (torch.uint8, GEOMETRIES[3]),
        (torch.uint8, (2, 1, 256, 32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_caches(device, backend, kv_dtype, geometry) -> None:
    """Against the oracle of decode_cases, which unpacks the stored bytes itself; unowned slots hold the worst."""
    for dtype, lens, options in (
        (torch.float32, MIXED, {}),
        (torch.bfloat16, ([21, 40], [80, 40]), {"sliding_window": 17}),
        (torch.float16, DECODE, {"soft_cap": 3.0}),
    ):
        case = make_case(*lens, geometry, dtype, kv_dtype)
        case = replace(case, options={**case.options, **options}).to(device)
        out = ops.paged_attention(*case.arguments(), backend=backend)
        rtol, atol = ATTENTION[dtype]
        torch.testing.assert_close(out.cpu().double(), oracle(case), rtol=rtol, atol=atol)


@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES, ids=str)
def test_small_values_keep_their_digits_in_float16(device, kv_dtype) -> None:
    case = make_case([1, 20], [33, 20], (4, 2, 64, 32), torch.float16, kv_dtype)
    case = replace(case, options={**case.options, "value_scale": case.options["value_scale"] * 1e-3}).to(device)
    for backend in BACKENDS:
        out = ops.paged_attention(*case.arguments(), backend=backend).cpu().double()
        assert (out - oracle(case)).norm() < 3e-3 * oracle(case).norm()
