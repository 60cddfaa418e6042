"""sample, penalties, log-probs: the right distribution, the same in both implementations and in any batch."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import random_rows, sample_rows
from slipstream_kernels import ops
from slipstream_kernels.sample.reference.sample import log_exponential, row_keys

BACKENDS = ["reference", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def draws(logits: torch.Tensor, num_draws: int, backend: str, by: str = "seed", **filters: float) -> torch.Tensor:
    """Sample one distribution num_draws times, varying the seed or the position; temperature 0.8."""
    device = logits.device
    counter, zeros = torch.arange(num_draws, device=device), torch.zeros(num_draws, dtype=torch.int64, device=device)
    rows = logits.expand(num_draws, -1).contiguous()
    columns = {"top_k": None, "top_p": None, "min_p": None}
    for name, value in filters.items():
        columns[name] = torch.full((num_draws,), value, device=device).to(
            torch.int32 if name == "top_k" else torch.float32
        )
    seeds, positions = (counter * 7919 + (5 << 40), zeros) if by == "seed" else (zeros + 3, counter)
    temperature = torch.full((num_draws,), 0.8, device=device)
    return sample_rows(rows, seeds, positions, backend, temperature=temperature, **columns)


def chi_squared(tokens: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    counts = torch.bincount(tokens.cpu(), minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0, "a filtered token was drawn"
    expected, counts = len(tokens) * probs[probs > 0], counts[probs > 0]
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def filtered_probs(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The obvious fp64 version: sort, cut, renormalise."""
    z, order = (logits.cpu().double() / 0.8).sort(descending=True)
    if top_k:
        z[top_k:] = -torch.inf
    probs = z.softmax(-1)
    probs[probs.cumsum(-1) - probs >= top_p] = 0
    probs[probs < min_p * probs[0]] = 0
    return torch.zeros_like(probs).index_put_((order,), probs / probs.sum())


FILTERS = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("by", ["seed", "position"])
def test_distribution(device, backend, filters, by) -> None:
    if backend == "triton" and device.type == "cpu" and (filters or by == "position"):
        pytest.skip("the interpreter takes 0.1 s a row; there triton is compared with the reference draw by draw")
    num_draws = 250 if backend == "triton" and device.type == "cpu" else 8000
    logits = torch.linspace(0, 2.5, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(1))].to(device)
    probs = filtered_probs(logits, **filters)
    statistic, freedom = chi_squared(draws(logits, num_draws, backend, by, **filters), probs)
    # The 99.99 % point of chi-squared (Wilson-Hilferty).  Seeds are fixed: a correct sampler passes always.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 50, 1100, 9000, 33001])
def test_triton_draws_the_references_tokens(device, vocab_size, dtype) -> None:
    """From one chunk that fits whole to several: a forbidden half and whole, and more equals than can be held."""
    rows = random_rows(12, vocab_size, device)
    if dtype != torch.float32 and device.type == "cpu" and vocab_size not in (50, 9000):
        pytest.skip("the interpreter is slow; there two sizes tell")
    rows["logits"] = rows["logits"].to(dtype)
    rows["logits"][1, : vocab_size // 2] = float("-inf")
    rows["logits"][2] = float("-inf")
    rows["logits"][3:5] = rows["logits"][3:5].round()
    for unused in ((), ("top_k",), ("top_p", "min_p")):
        case = {name: None if name in unused else tensor for name, tensor in rows.items()}
        assert torch.equal(sample_rows(**case, backend="triton"), sample_rows(**case, backend="reference"))


def test_a_row_does_not_depend_on_the_batch(device, backend) -> None:
    rows = random_rows(10, 700, device)
    together = sample_rows(**rows, backend=backend)
    for row in range(10):
        alone = {name: tensor[row : row + 1] for name, tensor in rows.items()}
        assert sample_rows(**alone, backend=backend).item() == together[row].item()


def test_greedy_takes_the_first_of_equals(device, backend) -> None:
    logits = torch.zeros(3, 2500, device=device)
    logits[1, [1200, 2400]] = 2.0
    logits[2] = float("-inf")
    zero = torch.zeros(3, device=device)
    counter = torch.zeros(3, dtype=torch.int64, device=device)
    assert ops.sample(logits, ops.SamplingMetadata(), None, None, backend=backend).tolist() == [0, 1200, 0]
    assert ops.sample(logits, ops.SamplingMetadata(zero), counter, counter, backend=backend).tolist() == [0, 1200, 0]
    assert ops.sample(logits, ops.SamplingMetadata(zero + 1), counter, counter, backend=backend)[2].item() == 0


def test_greedy_fills_what_is_given(device, backend) -> None:
    logits, held = torch.zeros(3, 5000, device=device), torch.full((5,), -1, device=device)
    logits[[0, 1, 2], [7, 4999, 4096]] = 1.0
    found = ops.greedy(logits, held[1:4], backend=backend)
    assert found.data_ptr() == held[1:4].data_ptr() and held.tolist() == [-1, 7, 4999, 4096, -1]
    for wrong in (held, held[:3].int(), held[::2]):
        with pytest.raises(ValueError, match=r"^out: "):
            ops.greedy(logits, wrong, backend=backend)


def test_draws_fill_what_is_given(device, backend) -> None:
    """Greedy rows among drawn ones have the tokens of a greedy draw, filters or not."""
    rows, held = random_rows(12, 700, device), torch.full((14,), -1, device=device)
    found = sample_rows(**rows, backend=backend, out=held[1:13])
    assert found.data_ptr() == held[1:13].data_ptr() and held[[0, 13]].tolist() == [-1, -1]
    assert torch.equal(held[1:13], sample_rows(**rows, backend=backend))
    is_greedy = rows["temperature"] == 0
    assert 0 < is_greedy.sum() < 12
    assert torch.equal(held[1:13][is_greedy], ops.greedy(rows["logits"], backend=backend)[is_greedy])
    for wrong in (held, held[:12].int(), held[::2]):
        with pytest.raises(ValueError, match=r"^out: "):
            sample_rows(**rows, backend=backend, out=wrong)


def test_the_noise_is_that_of_the_next_position(device, backend) -> None:
    """What a row's seed draws behind a position stays what it was: Gumbel-max with the noise of the token drawn."""
    rows = random_rows(6, 300, device)
    logits, seeds, positions = rows["logits"], rows["seeds"], rows["positions"]
    metadata = ops.SamplingMetadata(torch.full((6,), 0.5, device=device))
    noise = log_exponential(row_keys(seeds, positions + 1)[..., None], torch.arange(300, device=device).int())
    assert torch.equal(
        ops.sample(logits, metadata, seeds, positions, backend=backend), (2 * logits - noise).argmax(dim=-1)
    )


def test_tokens_equal_to_the_last_kept_stay(device, backend) -> None:
    logits = torch.tensor([2.0, 1.5, 1.5, 1.5, -9.0], device=device)
    assert set(draws(logits, 30, backend, top_k=2).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 3000}, {"top_k": 4000, "top_p": 0.8}, {"min_p": 0.5}])
def test_flat_rows_need_more_than_the_largest_tokens(device, filters) -> None:
    """Wider than the reference's first guess of 256 tokens, and than the candidates that triton's chunks leave."""
    rows = random_rows(4, 6000, device)
    rows.update(
        logits=rows["logits"] / 30, temperature=torch.ones(4, device=device), top_k=None, top_p=None, min_p=None
    )
    for name, value in filters.items():
        rows[name] = torch.full((4,), value, device=device).to(torch.int32 if name == "top_k" else torch.float32)
    tokens = sample_rows(**rows, backend="reference")
    ranks = (rows["logits"] > rows["logits"].gather(1, tokens[:, None])).sum(-1)
    assert torch.equal(tokens, sample_rows(**rows, backend="triton"))
    assert ranks.max() > 256


def penalty_case(device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    prompt_lens = torch.tensor([0, 4, 9, 2], dtype=torch.int32)
    return {
        "token_ids": torch.randint(0, 40, (4, 20), generator=generator).to(device),
        "prompt_lens": prompt_lens.to(device),
        "num_tokens": (prompt_lens + torch.tensor([0, 0, 11, 7], dtype=torch.int32)).to(device),
        "repetition": torch.tensor([1.3, 1.3, 1.0, 0.7]).to(device),
        "presence": torch.tensor([0.5, 0.5, -0.25, 0.0]).to(device),
        "frequency": torch.tensor([0.1, 0.1, 0.2, 0.0]).to(device),
    }


@pytest.mark.parametrize("unused", [(), ("repetition",), ("presence", "frequency")])
def test_penalties(device, backend, unused) -> None:
    case = {name: None if name in unused else tensor for name, tensor in penalty_case(device).items()}
    logits = torch.randn(4, 1050, device=device)
    expected = logits.cpu().clone()
    for row, tokens in enumerate(case["token_ids"].tolist()):
        prompt_len, num_tokens = case["prompt_lens"][row].item(), case["num_tokens"][row].item()
        for token in set(tokens[:num_tokens]):
            x, count = expected[row, token].item(), tokens[prompt_len:num_tokens].count(token)
            if case["repetition"] is not None:
                x = x / case["repetition"][row].item() if x > 0 else x * case["repetition"][row].item()
            if case["presence"] is not None:
                x -= case["frequency"][row].item() * count + case["presence"][row].item() * (count > 0)
            expected[row, token] = x
    penalties = ops.Penalties(*(case.pop(name) for name in ops.Penalties._fields))
    ops.apply_penalties(logits, **case, penalties=penalties, backend=backend)
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_bias_adds_and_forbids(device, backend) -> None:
    logits = torch.randn(3, 60, device=device)
    expected = logits.clone()
    expected[0, 5] += 2.5
    expected[2, 59] = float("-inf")
    values = torch.tensor([2.5, float("-inf")], device=device)
    ops.apply_bias(
        logits, torch.tensor([0, 2], device=device), torch.tensor([5, 59], device=device), values, backend=backend
    )
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(("vocab_size", "num_words"), [(1, 1), (50, 2), (2500, 79), (2500, 90), (2500, 40)])
def test_token_masks_forbid(device, backend, vocab_size, num_words) -> None:
    """Rows in any order, in logits that are a part of wider ones; words beyond the vocabulary, and too few of them."""
    wide = torch.randn(6, vocab_size + 3, device=device)
    wide[0, ::7], wide[2, ::5] = float("nan"), float("inf")
    rows, generator = [5, 0, 2], torch.Generator().manual_seed(vocab_size + num_words)
    bits = torch.randint(-(1 << 31), 1 << 31, (3, num_words), generator=generator).int()
    bits[1], expected = torch.tensor([0, -1] * num_words)[:num_words], wide.clone()
    for row, words in zip(rows, bits.tolist()):
        for token_id in range(min(vocab_size, 32 * num_words)):
            if not words[token_id // 32] >> token_id % 32 & 1:
                expected[row, token_id] = float("-inf")
    assert (expected == float("-inf")).any() and (vocab_size == 1 or expected[rows].isnan().any())
    ops.apply_token_masks(wide[:, :vocab_size], torch.tensor(rows, device=device), bits.to(device), backend=backend)
    torch.testing.assert_close(wide, expected, rtol=0, atol=0, equal_nan=True)


def test_no_row_is_masked(device, backend) -> None:
    logits = torch.zeros(2, 40, device=device)
    rows, bits = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, 2, dtype=torch.int32, device=device)
    ops.apply_token_masks(logits, rows, bits, backend=backend)
    assert not logits.any()


@pytest.mark.parametrize("k", [0, 4, 21, 130])
def test_top_logprobs(device, backend, k) -> None:
    logits = 4 * torch.randn(5, 5000, device=device)
    logits[1, :4500] = float("-inf")
    chosen = torch.tensor([0, 4700, 4999, 17, 2500], device=device)
    result = ops.top_logprobs(logits, k, chosen, backend=backend)
    expected = logits.double().log_softmax(-1)
    picked = expected.gather(1, chosen[:, None])
    torch.testing.assert_close(result.chosen.double(), picked.view(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(result.rank, (expected > picked).sum(-1) + 1)
    values, token_ids = expected.topk(k)
    torch.testing.assert_close(result.values.double(), values, rtol=1e-5, atol=1e-5)
    assert torch.equal(result.token_ids, token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_top_logprobs_of_equals_and_forbidden(device, backend, dtype) -> None:
    """Rows with more equal tokens than are looked at, with fewer possible tokens than wanted, and of an odd width."""
    logits = torch.randn(4, 9001, device=device).to(dtype)
    logits[1] = 2.0
    logits[2] = logits[2].round()
    logits[3, 7:] = float("-inf")
    result = ops.top_logprobs(logits, 12, torch.tensor([0, 1, 2, 3], device=device), backend=backend)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(result.values.double(), expected.topk(12).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected.gather(1, result.token_ids), result.values.double(), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == 12 for row in result.token_ids.tolist())
    assert result.rank[1] == 1
