"""Layers of published models, cut for ranks: which keep the layouts that fast kernels read."""

from __future__ import annotations

import pytest
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec
from slipstream.nn.parallel import Parallel
from slipstream_kernels.gemm import int4_layout, int8_layout

# hidden size, heads of queries and of keys, head_dim, intermediate size
MODELS = {
    "Llama-3.2-3B": (3072, 24, 8, 128, 8192),
    "Llama-3-70B": (8192, 64, 8, 128, 28672),
    "Qwen2.5-3B": (2048, 16, 2, 128, 11008),
    "Qwen2.5-7B": (3584, 28, 4, 128, 18944),
    "Qwen2.5-14B": (5120, 40, 8, 128, 13824),
    "Qwen2.5-32B": (5120, 40, 8, 128, 27648),
    "Qwen2.5-72B": (8192, 64, 8, 128, 29568),
    "Qwen3-32B": (5120, 64, 8, 128, 25600),
    "Mistral-Nemo": (5120, 32, 8, 128, 14336),
    "Yi-34B": (7168, 56, 8, 128, 20480),
    "Gemma-2-9B": (3584, 16, 8, 256, 14336),
    "Baichuan2-7B": (4096, 32, 32, 128, 11008),
    "Baichuan2-13B": (5120, 40, 40, 128, 13696),
    "GLM-4-9B": (4096, 32, 2, 128, 13696),
    "Phi-4": (5120, 40, 10, 128, 17920),
}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_keep_fast_layouts(name: str, size: int) -> None:
    hidden, q_heads, kv_heads, head_dim, intermediate = MODELS[name]
    if q_heads % size or (kv_heads % size and size % kv_heads):
        pytest.skip("heads that ranks cannot share")
    specs = [AttentionSpec(hidden, hidden, q_heads, kv_heads, head_dim, None), DenseSpec(hidden, intermediate)]
    for rank in range(size):
        for linear in (linear.of_rank(Parallel(rank, size)) for spec in specs for linear in spec.linears):
            assert int4_layout.refusal(linear.out_features, linear.in_features, 128) is None, linear
            assert int8_layout.refusal(linear.out_features, linear.in_features) is None, linear
