"""Cases of ragged attention, and what is right."""

from __future__ import annotations

import torch
from latent_cases import starts_of
from slipstream_kernels import ops

RaggedCase = tuple[torch.Tensor, ops.RaggedKeys, ops.RaggedMetadata]  # as ops.ragged_attention takes them


def ragged_case(
    query_lens: list[int],
    key_lens: list[int],
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int, int] = (24, 8, 16),
    heads: int = 3,
    is_causal: bool = True,
) -> RaggedCase:
    """Keys and values as views of one tensor, as the up-projection gives them; two unused rows behind each request.
    sizes: features of a key of one head, of the part that heads share, of a value."""
    torch.manual_seed(2)
    nope, rope_dim, value_dim = sizes
    num_keys = sum(key_lens) + 2 * len(key_lens)
    both = torch.randn(num_keys, heads, nope + value_dim).to(device, dtype)
    latents = torch.randn(num_keys, 40 + rope_dim).to(device, dtype)
    q = torch.randn(sum(query_lens), heads, nope + rope_dim).to(device, dtype)
    lens = torch.tensor(key_lens, dtype=torch.int32, device=device)
    key_starts = starts_of([length + 2 for length in key_lens], device)
    for request, length in enumerate(key_lens):
        stop = int(key_starts[request]) + length
        both[stop : stop + 2], latents[stop : stop + 2] = float("nan"), float("nan")
    metadata = ops.RaggedMetadata(
        starts_of(query_lens, device), key_starts, lens, max(query_lens), max(key_lens), is_causal
    )
    return q, ops.RaggedKeys(both[..., :nope], latents[:, 40:], both[..., nope:]), metadata


def dense_ragged(case: RaggedCase, scale: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in fp64, on the host."""
    keys, metadata = case[1:]
    q, k, k_rope, v = (tensor.cpu() for tensor in (case[0], keys.k, keys.k_rope, keys.v))
    starts, key_starts = metadata.query_start_loc.tolist(), metadata.key_start_loc.tolist()
    out, lse = torch.zeros(*q.shape[:2], v.shape[2]).double(), torch.full(q.shape[:2], float("-inf")).double()
    for request, length in enumerate(metadata.key_lens.tolist()):
        rows = slice(*starts[request : request + 2])
        own = slice(key_starts[request], key_starts[request] + length)
        shared = k_rope[own, None].double().expand(-1, k.shape[1], -1)
        scores = torch.einsum("qhd,khd->qhk", q[rows].double(), torch.cat([k[own].double(), shared], -1)) * scale
        if metadata.is_causal:
            query_len = rows.stop - rows.start
            positions = length - query_len + torch.arange(query_len)
            scores.masked_fill_((torch.arange(length) > positions[:, None])[:, None], float("-inf"))
        lse[rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("qhk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v[own].double())
    return out, lse
