"""Ragged attention in CUDA: fills the kernel's arguments and launches it.  Hopper (compute capability 9.0) only.

No device value is read on the host: work is found on the device.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from slipstream_kernels.attention.cuda.prefill_attention import SECTION_BYTES, TYPES, PrefillParams, work_counters
from slipstream_kernels.attention.ragged_call import RaggedCall
from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.cuda.launch import addresses, fields, launch

SOURCE = "sm90_ragged_attention.cu"
# Features of a key of one head, of the part that heads share, of a value: DeepSeek's heads, GLM-4.7-Flash's.
SIZES = ((128, 64, 128), (192, 64, 256))
POINTERS = ("shared_keys", "key_start_loc", "lse")
STRIDES = ("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride", "shared_token_stride")
COUNTS = ("num_keys", "is_causal")


class RaggedParams(PrefillParams):
    """csrc/params/ragged_params.h, field by field, behind those of the prefill kernel."""

    _fields_: ClassVar = [*fields(POINTERS, STRIDES, COUNTS)]


def refusal(call: RaggedCall) -> str | None:
    """Why this version cannot take the call; None if it can."""
    if (reason := hopper_refusal(call.q.device, "q is")) is not None:
        return reason
    if call.q.dtype not in TYPES:
        return f"q is {call.q.dtype}, not bfloat16 or float16"
    if _sizes(call) not in SIZES:
        return f"features of a key's own part, of its shared part and of a value are {_sizes(call)}, not one of {SIZES}"
    if call.keys.k.shape[0] == 0:
        return "there are no keys"
    for name, tensor in (("q", call.q), ("k", call.keys.k), ("k_rope", call.keys.k_rope), ("v", call.keys.v)):
        if tensor.data_ptr() % 16 or any(stride % 8 for stride in tensor.stride()[:-1]):
            return f"the rows of {name} do not begin at multiples of 16 bytes"
    return build_refusal(SOURCE, defines(call))


def _sizes(call: RaggedCall) -> tuple[int, int, int]:
    return call.keys.k.shape[2], call.keys.k_rope.shape[1], call.keys.v.shape[2]


def defines(call: RaggedCall) -> tuple[str, ...]:
    """The macros that choose the variant of the kernel for a call."""
    return variant(call.q.dtype, _sizes(call))


def variant(dtype: torch.dtype, sizes: tuple[int, int, int]) -> tuple[str, ...]:
    """The macros of one variant of the kernel.  sizes: as SIZES has them."""
    names = ("SLIPSTREAM_OWN_DIM", "SLIPSTREAM_SHARED_DIM", "SLIPSTREAM_VALUE_DIM")
    return (f"SLIPSTREAM_TYPE={TYPES[dtype]}", *(f"{name}={size}" for name, size in zip(names, sizes)))


def variants() -> list[tuple[str, ...]]:
    """All variants, for building ahead of time."""
    return [variant(dtype, sizes) for dtype in TYPES for sizes in SIZES]


def ragged_attention(call: RaggedCall) -> None:
    """See ops.ragged_attention; writes call.out and call.lse.  One launch."""
    if call.q.shape[0] == 0 or call.metadata.num_requests == 0:
        return
    launch("ragged_attention", load(SOURCE, defines(call)), _params(call), call.q.device)


def _params(call: RaggedCall) -> RaggedParams:
    q, num_heads, device = call.q, call.q.shape[1], call.q.device
    keys, metadata = call.keys, call.metadata
    tensors = {
        "q": q, "key_cache": keys.k, "value_cache": keys.v, "out": call.out, "lse": call.lse,
        "query_start_loc": metadata.query_start_loc, "seq_lens": metadata.key_lens,
        "counters": work_counters(device), "shared_keys": keys.k_rope, "key_start_loc": metadata.key_start_loc,
    }  # fmt: skip
    bytes_of_head = max(metadata.max_key_len, 1) * sum(_sizes(call)) * q.element_size()
    return RaggedParams(
        **addresses(tensors),
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        num_tokens=q.shape[0],
        num_requests=metadata.num_requests,
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        block_size_log2=7,  # tiles of keys end there, or at half of it
        heads_per_section=max(1, min(num_heads, SECTION_BYTES // bytes_of_head)),
        num_sms=count_sms(device),
        scale=call.scale,
        key_token_stride=keys.k.stride(0),
        key_head_stride=keys.k.stride(1),
        value_token_stride=keys.v.stride(0),
        value_head_stride=keys.v.stride(1),
        shared_token_stride=keys.k_rope.stride(0),
        num_keys=keys.k.shape[0],
        is_causal=metadata.is_causal,
    )
