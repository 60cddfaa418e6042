"""Cases of ragged attention, and what is right."""

from __future__ import annotations

import torch
from latent_cases import starts_of


def ragged_case(
    query_lens: list[int],
    key_lens: list[int],
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int, int] = (24, 8, 16),
    heads: int = 3,
) -> tuple:
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
    return q, both[..., :nope], latents[:, 40:], both[..., nope:], starts_of(query_lens, device), key_starts, lens


def dense_ragged(case: tuple, is_causal: bool, scale: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in fp64, on the host."""
    q, k, k_rope, v, starts, key_starts, lens = (tensor.cpu() for tensor in case)
    out, lse = torch.zeros(*q.shape[:2], v.shape[2]).double(), torch.full(q.shape[:2], float("-inf")).double()
    for request, length in enumerate(lens.tolist()):
        rows = slice(*starts[request : request + 2].tolist())
        keys = slice(int(key_starts[request]), int(key_starts[request]) + length)
        shared = k_rope[keys, None].double().expand(-1, k.shape[1], -1)
        scores = torch.einsum("qhd,khd->qhk", q[rows].double(), torch.cat([k[keys].double(), shared], -1)) * scale
        if is_causal:
            query_len = rows.stop - rows.start
            positions = length - query_len + torch.arange(query_len)
            scores.masked_fill_((torch.arange(length) > positions[:, None])[:, None], float("-inf"))
        lse[rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("qhk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v[keys].double())
    return out, lse
