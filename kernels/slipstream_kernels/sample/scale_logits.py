"""scale_logits: contract and choice.  What some models do to their logits, in one pass over memory."""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_float, require_unit_stride, select


def scale_logits(
    logits: torch.Tensor, factor: float = 1.0, soft_cap: float | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Return factor * logits, or soft_cap * tanh(factor * logits / soft_cap), computed in fp32.

    logits: [num_rows, vocab_size]; rows may be strided.  Returns a new contiguous float32 tensor of that shape.
    soft_cap: above 0; None: no cap.  Sources: Granite 3's logits_scaling; Gemma 2, arXiv:2408.00118.
    """
    require_float("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected [num_rows, vocab_size]")
    require_unit_stride("logits", logits)
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap: {soft_cap} is not above 0")
    return select("sample.scale_logits", backend, logits).scale_logits(logits, factor, soft_cap)
