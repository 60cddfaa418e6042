"""KV cache dtypes by their names in the configuration, and refusals by model and device."""

from __future__ import annotations

import torch
from slipstream_kernels import ops

from slipstream.core.errors import ConfigError
from slipstream.nn.spec import DecoderSpec

FIELD = "kv_cache_dtype"
FP8_LATENTS = "fp8_e4m3"
QUANTIZED = ops.QUANTIZED_KV_DTYPES


def resolve_kv_dtype(
    name: str, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, block_size: int
) -> torch.dtype:
    """The dtype of the cache's tensors; "auto" is the model's own.

    Raises ConfigError for a float type other than the model's, and for types that the kernels cannot serve.
    """
    own = str(dtype).removeprefix("torch.")
    if name in ("auto", own):
        return dtype
    if name not in QUANTIZED:
        accepted = f"auto or {own}, which the model computes in, {', '.join(QUANTIZED)}"
        raise ConfigError(FIELD, name, f"accepted: {accepted}")
    refusal = _refusal(name, spec, device, block_size)
    if refusal is not None:
        is_latent = any(attention.latent is not None for attention in spec.attentions)
        takes_fp8 = is_latent and _latent_refusal(FP8_LATENTS, spec, device) is None
        accepted = f"auto, {own} or {FP8_LATENTS}" if takes_fp8 else f"auto or {own}"
        raise ConfigError(FIELD, name, f"{refusal}; accepted: {accepted}")
    return QUANTIZED[name]


def gpu_geometry_refusal(spec: DecoderSpec, block_size: int, kv_dtype: torch.dtype | None = None) -> str | None:
    """Why no GPU kernel supports such a cache, so that the reference runs; None if one does.

    kv_dtype: None for the model's own.
    """
    for attention in spec.attentions:
        if attention.latent is None and attention.head_dim not in ops.TRITON_HEAD_DIMS:
            return f"attention of head_dim {attention.head_dim} is the reference's, accepted: {ops.TRITON_HEAD_DIMS}"
    smallest = ops.triton_min_block_size(kv_dtype)
    if block_size < smallest:
        return f"attention over blocks of {block_size} is the reference's, accepted: >= {smallest}"
    return None


def _refusal(name: str, spec: DecoderSpec, device: torch.device, block_size: int) -> str | None:
    if any(attention.latent is not None for attention in spec.attentions):
        return _latent_refusal(name, spec, device)
    odd = [attention.head_dim for attention in spec.attentions if attention.head_dim % 2]
    if name == "int4" and odd:
        return f"two values share a byte, head_dim {odd[0]} is odd"
    return _fp8_refusal(name, device) or (
        gpu_geometry_refusal(spec, block_size, QUANTIZED[name]) if device.type == "cuda" else None
    )


def _latent_refusal(name: str, spec: DecoderSpec, device: torch.device) -> str | None:
    if name != FP8_LATENTS:
        return f"latents are kept in 16 bits or {FP8_LATENTS}"
    for attention in spec.attentions:
        if attention.latent is None or attention.latent.rank % ops.LATENT_GROUP:
            return f"FP8 latents have a scale for each {ops.LATENT_GROUP} features, which do not divide theirs"
    return _fp8_refusal(name, device)


def _fp8_refusal(name: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    if name == "fp8_e4m3" and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        return f"FP8 needs compute capability 8.9, this GPU has {major}.{minor}"
    return None
