"""What deterministic mode's kernels are said to allocate for parts of sums is the most that they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.attention.triton import invariant_attention, invariant_latent_attention
from slipstream_kernels.gemm.triton import invariant_mm

CPU = torch.device("cpu")
NUM_SMS = 132


class NoKernel:
    """Launches nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **flags: None


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the fp32 tensors that are made, on a GPU of so many SMs whose kernels do nothing."""
    found: list[int] = []
    empty = torch.empty

    def noting(*sizes: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*sizes, **options)
        if options.get("dtype") == torch.float32:
            found.append(tensor.nbytes)
        return tensor

    for module in (invariant_mm, invariant_attention, invariant_latent_attention):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, NoKernel())
        monkeypatch.setattr(module, "count_sms", lambda device: NUM_SMS)
    monkeypatch.setattr(torch, "empty", noting)
    return found


def most_of(allocated: list[int], calls: Iterable[Callable[[], object]]) -> int:
    """Bytes of the call that allocates most."""
    most = 0
    for call in calls:
        allocated.clear()
        call()
        most = max(most, sum(allocated))
    return most


def lengths(max_seq_len: int) -> list[int]:
    """One for each number of parts."""
    found = {invariant_attention.count_parts(length): length for length in range(1, max_seq_len + 1, 99)}
    return [*found.values(), max_seq_len]


@pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features", "is_some"),
    [
        *((600, 4096, 14336, True), (7, 4096, 4096, True), (16, 6144, 4096, True)),
        *((300, 128256, 4096, False), (300, 512, 1024, False)),
    ],
)
def test_products(num_tokens: int, out_features: int, in_features: int, is_some: bool, allocated: list[int]) -> None:
    """Tiles of the head's many features alone fill the GPU; few input features are one part."""
    one = torch.zeros(1).bfloat16()

    def call(count: int) -> None:
        x, weight = one.expand(count, in_features), one.expand(out_features, in_features)
        invariant_mm.invariant_mm(x, weight, None, None)

    found = most_of(allocated, (partial(call, count) for count in range(1, num_tokens + 1)))
    assert ops.invariant_mm_bytes(num_tokens, out_features, in_features, torch.bfloat16, NUM_SMS) == found
    assert (found > 0) is is_some and found <= invariant_mm.MAX_PARTIAL_BYTES


def test_products_of_a_float32_model(allocated: list[int]) -> None:
    """All their tiles have one size."""

    def call(count: int) -> None:
        invariant_mm.invariant_mm(torch.zeros(1).expand(count, 4096), torch.zeros(1).expand(1024, 4096), None, None)
        allocated.remove(count * 1024 * 4)  # the result

    found = most_of(allocated, (partial(call, count) for count in range(1, 501)))
    assert ops.invariant_mm_bytes(500, 1024, 4096, torch.float32, NUM_SMS) == found > 0


@pytest.mark.parametrize(
    ("num_tokens", "heads", "max_seq_len", "is_some"),
    [
        *((300, (32, 8, 128), 131072, True), (900, (32, 8, 128), 700, True), (300, (8, 8, 96), 4000, True)),
        *((5, (32, 8, 128), 131072, True), (300, (32, 8, 128), 500, False)),
    ],
)
def test_attention(
    num_tokens: int, heads: tuple[int, int, int], max_seq_len: int, is_some: bool, allocated: list[int]
) -> None:
    num_q_heads, num_kv_heads, head_dim = heads
    cache, one = torch.zeros(1, num_kv_heads, 64, head_dim).bfloat16(), torch.ones(1, dtype=torch.int32)

    def call(count: int, length: int) -> None:
        q = torch.zeros(1).bfloat16().expand(count, num_q_heads, head_dim)
        metadata = ops.AttentionMetadata(one[None], one, one, count, length)
        call = AttentionCall(q, ops.KvCache(cache, cache), metadata, ops.AttentionOptions(1.0), q)
        invariant_attention.invariant_attention(call)

    counts = product(range(1, num_tokens + 1), lengths(max_seq_len))
    found = most_of(allocated, (partial(call, *each) for each in counts))
    assert ops.invariant_attention_bytes(num_tokens, *heads, max_seq_len, NUM_SMS) == found
    assert (found > 0) is is_some


def test_heads_that_fit_no_tile() -> None:
    """They are the reference's."""
    assert ops.invariant_attention_bytes(300, 71, 1, 64, 4000, NUM_SMS) == 0


@pytest.mark.parametrize("num_heads", [16, 72, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latent_attention(num_heads: int, dtype: torch.dtype, allocated: list[int]) -> None:
    cache, one = ops.empty_latent_cache(1, 64, 512, 64, dtype, CPU), torch.ones(1, dtype=torch.int32)

    def call(count: int, length: int) -> None:
        q = torch.zeros(1).to(dtype).expand(count, num_heads, 576)
        metadata = ops.AttentionMetadata(one[None], one, one, count, length)
        invariant_latent_attention.invariant_latent_attention(LatentCall(q, cache, metadata, 1.0, q))

    counts = product(range(1, 301), lengths(20_000))
    found = most_of(allocated, (partial(call, *each) for each in counts))
    assert ops.invariant_latent_bytes(300, num_heads, 512, dtype, 20_000, NUM_SMS) == found > 0
