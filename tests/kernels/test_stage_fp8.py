"""ops.stage_fp8, and attention in FP8: queries, keys less a mean, probabilities and values rounded to e4m3."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from decode_cases import make_case
from dense_attention import PagedBatch, dense_attention, make_batch
from slipstream.core.config import ModelConfig
from slipstream.worker.warm_up import warm_up_steps
from slipstream_kernels import ops
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.cuda import prefill_attention, prefill_stage
from slipstream_kernels.attention.reference.stage_fp8 import attend_rounded, to_e4m3
from slipstream_kernels.attention.stage_fp8 import staged_order
from slipstream_kernels.kv_cache import FP8_DTYPE as FP8
from slipstream_kernels.ops import paged_attention, stage_fp8

CPU = torch.device("cpu")
LENS = ([33, 129, 5, 1], [33, 190, 200, 0])  # queries, all tokens


def offset_batch(dtype: torch.dtype, geometry: tuple[int, int, int, int], device: torch.device = CPU):
    """Keys that share an offset of several times their spread, as real ones do in some features; and their mean."""
    batch = make_batch(*LENS, *geometry, dtype, device, seed=4)
    offset = torch.zeros(geometry[1], geometry[2], device=device)
    offset[:, ::7] = 9.0
    batch.key_cache.add_(offset[:, None].to(dtype))
    return batch, offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize("geometry", [(4, 2, 128, 64), (2, 1, 80, 16), (2, 2, 64, 128)], ids=str)
def test_staged_blocks_are_the_reference_s(
    device: torch.device, geometry: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Both against rows read one by one; past a request's end its last block is zero."""
    batch, mean = offset_batch(torch.float32 if dtype == FP8 else dtype, geometry, device)
    batch.value_cache[batch.block_tables[0, 0], 0, 3, 5] = 1e38 if dtype == torch.bfloat16 else 6e4
    caches = [cache if dtype != FP8 else to_e4m3(cache) for cache in (batch.key_cache, batch.value_cache)]
    _, cache, metadata, _ = batch.arguments(key=caches[0], value=caches[1])
    place = {token: index for index, token in enumerate(staged_order().tolist())}
    for name in ("reference", "triton"):
        keys, values = stage_fp8(cache, metadata, None if dtype == FP8 else mean, backend=name)
        assert values.shape == (4 * 4, geometry[1], geometry[2], 64) and values.dtype == FP8
        assert (keys is None) == (dtype == FP8)
        for request, seq_len in enumerate(batch.seq_lens.tolist()):
            for token in range(-(-seq_len // 64) * 64):
                staged = request * 4 + token // 64
                value = values[staged, :, :, place[token % 64]].float()
                key = None if keys is None else keys[staged, :, token % 64].float()
                if token >= seq_len:
                    assert not value.any() and (key is None or not key.any())
                    continue
                block = batch.block_tables[request, token // geometry[3]]
                assert torch.equal(value, to_e4m3(caches[1][block, :, token % geometry[3]]).float())
                if key is not None:
                    assert torch.equal(key, to_e4m3(caches[0][block, :, token % geometry[3]].float() - mean).float())


def test_places_are_those_of_a_thread_s_probabilities() -> None:
    """Of 64 x n scores a thread has columns 2 q and 2 q + 1 of each eight; as four neighbouring operands it gives
    those of two eights."""
    order = staged_order().tolist()
    assert sorted(order) == list(range(64))
    for first in range(0, 64, 16):
        for q in range(4):
            eights = [first // 16 * 16 + 2 * q + offset for offset in (0, 1, 8, 9)]
            assert order[first + 4 * q : first + 4 * q + 4] == eights


@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}], ids=["full", "window"])
def test_the_reference_loses_what_rounding_costs_and_less_by_a_mean(options: dict) -> None:
    batch, mean = offset_batch(torch.float32, (4, 2, 128, 64))
    exact = dense_attention(batch, 128**-0.5, **options)
    errors = []
    for key_mean in (mean, torch.zeros_like(mean)):
        out = paged_attention(*batch.arguments(key_mean=key_mean, **options), backend="reference")
        errors.append(((out.double() - exact)[:162].norm() / exact[:162].norm()).item())  # of prompts: 33 + 129 rows
        assert torch.allclose(out.double()[162:168], exact[162:168], atol=1e-5)  # short queries are not rounded
    smoothed, plain = errors
    assert 1e-2 < smoothed < 6e-2 and plain > 1.3 * smoothed


def test_what_cannot_be_smoothed_is_refused() -> None:
    batch, mean = offset_batch(torch.float32, (4, 2, 128, 64))
    with pytest.raises(ValueError, match="soft_cap and sinks change"):
        paged_attention(*batch.arguments(key_mean=mean, soft_cap=5.0))
    with pytest.raises(ValueError, match="soft_cap and sinks change"):
        paged_attention(*batch.arguments(key_mean=mean, sinks=torch.zeros(4)))
    with pytest.raises(ValueError, match="has no alibi_slopes"):
        paged_attention(*batch.arguments(key_mean=mean, alibi_slopes=torch.ones(4)))
    with pytest.raises(ValueError, match="key_mean: shape"):
        paged_attention(*batch.arguments(key_mean=mean[:1]))
    with pytest.raises(ValueError, match=r"key_mean: dtype torch.float64"):
        stage_fp8(*batch.arguments()[1:3], mean.double())
    with pytest.raises(ValueError, match=r"cache.key: dtype torch.float32, expected .* without a key_mean"):
        stage_fp8(*batch.arguments()[1:3], None)


GPU_CASES = {
    "16-row blocks": ((8, 2, 128, 16), {}),
    "one head": ((5, 1, 128, 256), {}),
    "window": ((8, 2, 128, 64), {"sliding_window": 100}),
    "narrow window": ((4, 4, 128, 64), {"sliding_window": 1}),
}


@pytest.fixture
def always_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_stage, "MIN_QUERY_LEN", 0)
    monkeypatch.setattr(prefill_stage, "MIN_FP8_SEQ_LEN", 0)
    monkeypatch.setattr(prefill_stage, "MAX_RATIO", 1 << 20)


@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_rounds_as_the_reference(hopper, dtype: torch.dtype, case: str, always_fp8) -> None:
    """Slots that no request owns hold NaN. Probabilities are rounded relative to other maxima than the reference's."""
    geometry, options = GPU_CASES[case]
    batch, mean = offset_batch(dtype, geometry, hopper)
    arguments = batch.arguments(key_mean=mean, **options)
    expected, found = (paged_attention(*arguments, backend=backend) for backend in ("reference", "cuda"))
    exact = dense_attention(batch, 128**-0.5, **options)
    rows = slice(0, 162)
    error = ((found.cpu().double() - exact)[rows].norm() / exact[rows].norm()).item()
    assert 1e-2 < error < 6e-2
    off = ((found - expected)[rows].float().norm() / expected[rows].float().norm()).item()
    assert off < 4e-2 and off < error


@pytest.mark.parametrize("spread", [1.0, 12.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_long_sums_keep_their_bits(hopper, split: bool, spread: float, always_fp8) -> None:
    """Over an FP8 cache, whose keys and values are exact: 0.25 is what all values have in common, and what sums of few
    bits lose (6 % after 64k keys). split: few tiles of queries, whose keys several CTAs share."""
    query_len, seq_len = (130 if split else 2100), 39_990
    generator = torch.Generator(device=hopper).manual_seed(9)
    num_blocks = -(-seq_len // 64)
    k, v = (torch.randn(num_blocks, 2, 64, 128, generator=generator, device=hopper) for _ in range(2))
    keys, values = to_e4m3(k * spread**0.5), to_e4m3(v + 0.25)
    q = torch.randn(query_len, 4, 128, generator=generator, device=hopper).bfloat16()
    tables = torch.arange(num_blocks, dtype=torch.int32, device=hopper)[None]
    starts = torch.tensor([0, query_len], dtype=torch.int32, device=hopper)
    scales = torch.tensor([0.5, 2.0], device=hopper), torch.tensor([1.5, 0.25], device=hopper)
    lens = torch.tensor([seq_len], dtype=torch.int32, device=hopper)
    metadata = ops.AttentionMetadata(tables, starts, lens, query_len, seq_len)
    options = ops.AttentionOptions(128**-0.5, fp8_queries=True, fp8_probs=True)
    arguments = q, ops.KvCache(keys, values, *scales), metadata, options
    found, again = (paged_attention(*arguments, backend="cuda") for _ in range(2))
    assert torch.equal(found, again)
    unit = q.float().abs().amax(-1, keepdim=True) / 448
    rounded = (q.float() * (1 / unit)).to(FP8).float() * unit
    for head in range(4):
        kv = head // 2
        scores = rounded[-64:, head] @ (keys[:, kv].float().flatten(0, 1)[:seq_len].T * scales[0][kv] * 128**-0.5)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(seq_len - 63)
        flat = values[:, kv].float().flatten(0, 1)[:seq_len] * scales[1][kv]
        exact = scores.masked_fill(hidden, float("-inf")).double().softmax(-1) @ flat.double()
        error = ((found[-64:, head].double() - exact).norm() / exact.norm()).item()
        assert error < 3.5e-2
        bias = ((found[-64:, head].double() - exact).sum() / exact.sum()).abs().item()
        assert bias < 5e-3


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"sinks": True}], ids=["plain", "window", "sinks"])
@pytest.mark.parametrize("geometry", [(8, 2, 128, 16), (5, 1, 128, 128)], ids=str)
def test_an_fp8_cache_is_read_as_by_keys_alone_in_fp8(hopper, geometry, options: dict, always_fp8) -> None:
    """Slots and scales that no request owns hold NaN, which the kernel reads in a request's last block."""
    moved = make_case([33, 129, 5, 70], [33, 190, 200, 1003], geometry, torch.bfloat16, FP8, seed=8).to(hopper)
    if "sinks" in options:
        options = {"sinks": torch.linspace(-1.0, 2.0, geometry[0], device=hopper)}
    found, expected = (
        paged_attention(*moved.arguments(fp8_queries=True, fp8_probs=kind, **options), backend="cuda")
        for kind in (True, False)
    )
    assert found.isfinite().all()
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    assert 5e-3 < error < 4e-2


def kind_of(of: PagedBatch, num_tokens: int, longest: int, **options: object) -> int:
    """The kernel of so many tokens of a request as long as `longest`, and of the call's options."""
    q = torch.empty(num_tokens, *of.q.shape[1:], dtype=of.q.dtype, device="meta")
    one = torch.empty(1, dtype=torch.int32, device="meta")
    batch = replace(of, q=q, query_start_loc=one, seq_lens=one, max_query_len=num_tokens, max_seq_len=longest)
    return prefill_attention.source_of_keys_and_values(AttentionCall(*batch.arguments(**options), q))


@pytest.mark.parametrize("budget", [512, 1536, 2048, 3000, 4096, 8192])
@pytest.mark.parametrize("heads", [(32, 8), (40, 40)], ids=str)
@pytest.mark.parametrize("is_fp8_cache", [False, True])
def test_a_start_runs_every_kernel_of_prompts_in_fp8(budget: int, heads: tuple[int, int], is_fp8_cache: bool) -> None:
    batch, mean = offset_batch(torch.bfloat16, (*heads, 128, 64), torch.device("meta"))
    options: dict[str, object] = {"key_mean": mean}
    if is_fp8_cache:
        batch = replace(batch, key_cache=batch.key_cache.to(FP8), value_cache=batch.value_cache.to(FP8))
        options = {"fp8_queries": True, "fp8_probs": True}
    model = ModelConfig(model="m", prefill_attention_dtype="fp8", max_model_len=131_072)
    warmed = {kind_of(batch, *step, **options) for step in warm_up_steps(budget, model)}
    met = {
        kind_of(batch, num_tokens, longest, **options)
        for num_tokens in {17, 64, 600, 1535, 1536, 2047, 2048, budget}
        if num_tokens <= budget
        for longest in (num_tokens, 2 * num_tokens, 4095, 4096, 9000, 60_000, 131_072)
        if num_tokens <= longest
    }
    assert met <= warmed and len(warmed) >= (2 if budget >= 1536 else 1)


def test_both_products_in_fp8_is_chosen_where_asked_for(always_fp8) -> None:
    """Soft caps and ALiBi leave probabilities in 16 bit; a 16-bit cache is not rounded without means."""
    batch, mean = offset_batch(torch.bfloat16, (8, 2, 128, 64), torch.device("meta"))
    in_fp8 = replace(batch, key_cache=batch.key_cache.to(FP8), value_cache=batch.value_cache.to(FP8))

    def kind(of: PagedBatch, **options: object) -> int:
        return kind_of(of, 129, 200, **options)

    asked = {"fp8_queries": True, "fp8_probs": True}
    assert kind(batch, key_mean=mean) == kind(in_fp8, **asked) == prefill_attention.ALL_FP8
    assert kind(in_fp8, fp8_queries=True) == kind(in_fp8, **asked, soft_cap=5.0) == prefill_attention.FP8_KEYS
    assert kind(in_fp8, **asked, alibi_slopes=mean) == prefill_attention.FP8_KEYS
    assert kind(batch, **asked) == 0


def test_rounded_probabilities_keep_what_is_rare() -> None:
    """A thousand keys of 2^-12 of the largest probability are a fifth of the result."""
    scores = torch.full((1, 1001), -12 * math.log(2.0))
    scores[0, 0] = 0.0
    values = torch.ones(1001, 2)
    values[0] = 0.0
    torch.testing.assert_close(attend_rounded(scores, values), torch.full((1, 2), 1000 / 4096 / (1 + 1000 / 4096)))
