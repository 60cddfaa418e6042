"""Random rows for ops.sample, with settings of all kinds."""

from __future__ import annotations

import torch
from slipstream_kernels import ops


def sample_rows(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    backend: str = "auto",
    out: torch.Tensor | None = None,
    **columns: torch.Tensor,
) -> torch.Tensor:
    """ops.sample of what random_rows makes."""
    return ops.sample(logits, ops.SamplingMetadata(**columns), seeds, positions, out, backend=backend)


def random_rows(num_rows: int, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The fields of ops.sample's arguments."""
    generator = torch.Generator().manual_seed(vocab_size)

    def choose(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        index = torch.randint(len(values), (num_rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[index].to(device)

    return {
        "logits": (3 * torch.randn(num_rows, vocab_size, generator=generator)).to(device),
        "temperature": choose([0, 0.01, 0.5, 1, 2], torch.float32),
        "top_k": choose([0, 1, 7, 40, 10**6], torch.int32),
        "top_p": choose([0.0, 0.3, 0.9, 0.999, 1], torch.float32),
        "min_p": choose([0, 0.02, 0.3, 1.0], torch.float32),
        "seeds": torch.randint(-(2**62), 2**62, (num_rows,), generator=generator).to(device),
        "positions": torch.randint(0, 10**6, (num_rows,), generator=generator).to(device),
    }
