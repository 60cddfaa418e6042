"""ops.stage_fp8_keys, and attention over keys less a mean, rounded to e4m3."""

from __future__ import annotations

import pytest
import torch
from dense_attention import dense_attention, make_batch
from slipstream_kernels.attention.cuda import prefill_stage
from slipstream_kernels.ops import paged_attention, stage_fp8_keys

CPU = torch.device("cpu")
LENS = ([33, 129, 5, 1], [33, 190, 200, 0])  # queries, all tokens


def offset_batch(dtype: torch.dtype, geometry: tuple[int, int, int, int], device: torch.device = CPU):
    """Keys that share an offset of several times their spread, as real ones do in some features; and their mean."""
    batch = make_batch(*LENS, *geometry, dtype, device, seed=4)
    offset = torch.zeros(geometry[1], geometry[2], device=device)
    offset[:, ::7] = 9.0
    batch.key_cache.add_(offset[:, None].to(dtype))
    return batch, offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("geometry", [(4, 2, 128, 64), (2, 1, 80, 16), (2, 2, 64, 128)], ids=str)
def test_staged_blocks_are_the_reference_s(
    device: torch.device, geometry: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    batch, mean = offset_batch(dtype, geometry, device)
    batch.value_cache[batch.block_tables[0, 0], 0, 3, 5] = 1e38 if dtype == torch.bfloat16 else 6e4
    tensors = (batch.key_cache, batch.value_cache, batch.block_tables, batch.seq_lens, mean)
    found = {name: stage_fp8_keys(*tensors, max_seq_len=200, backend=name) for name in ("reference", "triton")}
    for ours, theirs in zip(found["triton"], found["reference"]):
        assert ours.shape == (4 * 4, geometry[1], 64, geometry[2])
        for request, seq_len in enumerate(batch.seq_lens.tolist()):
            rows = [
                part[4 * request : 4 * request + 4].transpose(1, 2).flatten(0, 1)[:seq_len] for part in (ours, theirs)
            ]
            assert torch.equal(*(row.float() for row in rows))
            assert rows[0].float().isfinite().all()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}], ids=["full", "window"])
def test_the_reference_loses_what_rounding_costs_and_less_by_a_mean(options: dict) -> None:
    batch, mean = offset_batch(torch.float32, (4, 2, 128, 64))
    exact = dense_attention(batch, 128**-0.5, **options)
    errors = []
    for key_mean in (mean, torch.zeros_like(mean)):
        out = paged_attention(
            *batch.tensors(), max_query_len=129, scale=128**-0.5, key_mean=key_mean, backend="reference", **options
        )
        errors.append(((out.double() - exact)[:162].norm() / exact[:162].norm()).item())  # of prompts: 33 + 129 rows
        assert torch.allclose(out.double()[162:168], exact[162:168], atol=1e-5)  # short queries are not rounded
    smoothed, plain = errors
    assert 1e-3 < smoothed < 4e-2 and plain > 1.5 * smoothed


def test_what_cannot_be_smoothed_is_refused() -> None:
    batch, mean = offset_batch(torch.float32, (4, 2, 128, 64))
    call = {"max_query_len": 129, "scale": 0.1}
    with pytest.raises(ValueError, match="soft_cap and sinks change"):
        paged_attention(*batch.tensors(), **call, key_mean=mean, soft_cap=5.0)
    with pytest.raises(ValueError, match="soft_cap and sinks change"):
        paged_attention(*batch.tensors(), **call, key_mean=mean, sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="key_mean: shape"):
        paged_attention(*batch.tensors(), **call, key_mean=mean[:1])
    with pytest.raises(ValueError, match=r"key_mean: dtype torch.float64"):
        stage_fp8_keys(*batch.tensors()[1:4], batch.seq_lens, mean.double(), max_seq_len=9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_rounds_as_the_reference(hopper, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_stage, "MIN_QUERY_LEN", 0)
    monkeypatch.setattr(prefill_stage, "MAX_RATIO", 1 << 20)
    batch, mean = offset_batch(dtype, (8, 2, 128, 16), hopper)
    call = {"max_query_len": 129, "scale": 128**-0.5, "key_mean": mean, "max_seq_len": 200}
    expected = paged_attention(*batch.tensors(), **call, backend="reference")
    found = paged_attention(*batch.tensors(), **call, backend="cuda")
    exact = dense_attention(batch, 128**-0.5)
    rows = slice(0, 162)
    error = ((found.cpu().double() - exact)[rows].norm() / exact[rows].norm()).item()
    assert 2e-3 < error < 4e-2  # rounded
    off = ((found - expected)[rows].float().norm() / expected[rows].float().norm()).item()
    assert off < (1e-2 if dtype == torch.float16 else 1.5e-2)  # the reference multiplies in the type
