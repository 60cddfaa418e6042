"""sample of filtered rows on Hopper: the first pass of sample/triton/sample.py, a second one in sm90_sample.cu."""

from __future__ import annotations

import ctypes

import torch

from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import launches_dependently
from slipstream_kernels.sample.metadata import SamplingMetadata
from slipstream_kernels.sample.triton.sample import first_pass, most_groups

SOURCE = "sm90_sample.cu"
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}

POINTERS = (
    "logits", "token_ids", "maxima", "sums", "winners", "group_maxima", "temperature", "top_k", "top_p", "min_p",
    "seeds", "positions",
)  # fmt: skip
COUNTS = ("num_rows", "vocab_size", "num_chunks", "num_groups", "group_log2", "most", "is_dependent")


class SampleParams(ctypes.Structure):
    """csrc/params/sample_params.h, field by field."""

    _fields_ = fields(POINTERS, ("row_stride",), COUNTS)


def refusal(logits: torch.Tensor) -> str | None:
    """Why this version cannot take these logits; None if it can."""
    if (reason := hopper_refusal(logits.device, "logits are")) is not None:
        return reason
    if logits.data_ptr() % 16 or logits.stride(0) * logits.element_size() % 16:
        return "logits has rows that do not begin at multiples of 16 bytes"
    return build_refusal(SOURCE, defines(logits.dtype))


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """The macro that chooses the variant of the kernel."""
    return (f"SLIPSTREAM_TYPE={TYPES[dtype]}",)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(dtype) for dtype in TYPES]


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.sample.  Two launches."""
    temperature = metadata.temperature
    assert temperature is not None  # rows that are filtered are drawn
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    if num_rows == 0:
        return token_ids
    left = first_pass(logits, temperature, metadata.filters, seeds, positions)
    tensors = {
        "logits": logits, "token_ids": token_ids, "maxima": left.maxima, "sums": left.sums, "winners": left.winners,
        "group_maxima": left.group_maxima, "temperature": temperature,
        "top_k": metadata.top_k, "top_p": metadata.top_p, "min_p": metadata.min_p, "seeds": seeds,
        "positions": positions,
    }  # fmt: skip
    params = SampleParams(
        **addresses(tensors),
        row_stride=logits.stride(0),
        num_rows=num_rows,
        vocab_size=vocab_size,
        num_chunks=left.grouping.num_chunks,
        num_groups=left.grouping.num_groups,
        group_log2=left.grouping.group.bit_length() - 1,
        most=most_groups(left.grouping, vocab_size),
        is_dependent=launches_dependently(logits.device),
    )
    library = load(SOURCE, defines(logits.dtype))
    launch("sample", library, params, logits.device)
    return token_ids
