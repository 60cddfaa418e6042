"""sample: contract and choice.  One token per row of logits, reproducible from (logits, seed, position) alone."""

from __future__ import annotations

import torch

from slipstream_kernels.sample.metadata import SamplingMetadata
from slipstream_kernels.select import require_float, require_shape, require_unit_stride, select, select_cuda


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    out: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Draw one token id per row: [num_rows] int64.

    logits: [num_rows, vocab_size] fp32, bf16 or fp16, unchanged; -inf forbids a token.
    seeds, positions: [num_rows] int64 (any seed; position of the row's own token, behind which one is drawn), needed
    unless every row is greedy.  out: contiguous, of the result's shape and dtype, to hold it.
    Draws by the Gumbel-max trick with counter-based noise hash(seed, position + 1, token id): a row's result does not
    depend on the other rows, and all implementations use the same noise (they can differ only where fp32 rounding
    decides).
    backend: "cuda" (filtered rows on Hopper; ValueError if it cannot run), "triton", "reference"; "auto": the first of
    these that can run.
    """
    _check(logits, metadata, seeds, positions)
    _check_out(out, logits)
    is_filtered = metadata.temperature is not None and any(column is not None for column in metadata.filters)
    version = select_cuda(
        "sample.sample",
        "sample.sample",
        backend,
        logits.is_cuda and is_filtered,
        lambda cuda: cuda.refusal(logits) if is_filtered else "no row is filtered",
    )
    return (version or select("sample.sample", backend, logits)).sample(logits, metadata, seeds, positions, out)


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None, *, backend: str = "auto") -> torch.Tensor:
    """The id of the highest logit per row, the lowest id among equals: [num_rows] int64.

    out: contiguous, of this shape and dtype, to hold them; then backend is "triton", "reference" or "auto".
    """
    if out is None:
        return sample(logits, SamplingMetadata(), None, None, backend=backend)
    _check_logits(logits)
    _check_out(out, logits)
    return select("sample.greedy", backend, logits).greedy(logits, out)


def _check_out(out: torch.Tensor | None, logits: torch.Tensor) -> None:
    if out is None:
        return
    require_shape("out", out, (logits.shape[0],))
    if out.dtype != torch.int64 or not out.is_contiguous():
        raise ValueError(f"out: dtype {out.dtype}, expected contiguous int64")


def _check_logits(logits: torch.Tensor) -> None:
    require_float("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits: shape {tuple(logits.shape)}, expected [num_rows, vocab_size]")
    require_unit_stride("logits", logits)


def _check(
    logits: torch.Tensor, metadata: SamplingMetadata, seeds: torch.Tensor | None, positions: torch.Tensor | None
) -> None:
    _check_logits(logits)
    expected = (
        ("temperature", metadata.temperature, torch.float32),
        ("top_k", metadata.top_k, torch.int32),
        ("top_p", metadata.top_p, torch.float32),
        ("min_p", metadata.min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    )
    for name, tensor, dtype in expected:
        if tensor is None:
            continue
        require_shape(name, tensor, (logits.shape[0],))
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected contiguous {dtype}")
    if metadata.temperature is not None and (seeds is None or positions is None):
        raise ValueError("seeds, positions: needed when temperature is given")
