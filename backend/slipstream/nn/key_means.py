"""Prompts that attend in FP8: refusals, and the means of a model's keys that are subtracted before these are rounded.

One vector for each layer and head of keys, measured after the rotation by build/key_means.py. They do not depend on the
request, so cached blocks stay shared.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.attention import AttentionBackendType, SplitKVFp8Attention
from slipstream.nn.decoder import Decoder
from slipstream.nn.self_attention import SelfAttention
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.tensor_file import write_tensors

FIELD = "prefill_attention_dtype"
FP8, SIXTEEN_BIT = "fp8", "16bit"
_OTHERS = f"auto or {SIXTEEN_BIT}"
FILE = "key_means.safetensors"
FP8_CACHE = ops.QUANTIZED_KV_DTYPES["fp8_e4m3"]


def check_fp8_prefill(
    config: ModelConfig, spec: DecoderSpec, device: torch.device, kv_dtype: torch.dtype | None
) -> None:
    """Raise ConfigError if the model's prompts cannot attend in FP8, before anything is read."""
    if config.prefill_attention_dtype != FP8:
        return
    refusal = _refusal(config, spec, device, kv_dtype)
    if refusal is not None:
        raise ConfigError(FIELD, FP8, f"{refusal}; accepted: {_OTHERS}")


def rounding_refusal(
    backend: AttentionBackendType, config: ModelConfig, device: torch.device, kv_dtype: torch.dtype | None
) -> str | None:
    """Why the backend's prompts would not attend in the type that is asked for, or None."""
    rounds_queries, wanted = backend is SplitKVFp8Attention, config.prefill_attention_dtype
    if wanted == SIXTEEN_BIT and rounds_queries:
        return f"{FIELD}={wanted}: it rounds queries"
    if wanted == FP8 and device.type == "cuda" and kv_dtype == FP8_CACHE and not rounds_queries:
        return f"{FIELD}={wanted}: over an FP8 cache it rounds no queries; accepted: {_OTHERS}"
    return None


def _refusal(config: ModelConfig, spec: DecoderSpec, device: torch.device, kv_dtype: torch.dtype | None) -> str | None:
    if config.deterministic:
        return "deterministic rounds nothing"
    if kv_dtype in ops.QUANTIZED_KV_DTYPES.values() and kv_dtype != FP8_CACHE:
        return "an int8 or int4 KV cache is attended in 16 bit"
    if device.type == "cuda" and (reason := ops.hopper_refusal(device, "device is")) is not None:
        return reason
    for attention in spec.attentions:
        if attention.latent is not None:
            return "latent attention has no keys of heads in its cache"
        if attention.soft_cap is not None or attention.sinks or attention.alibi_slopes:
            return "attention in FP8 has no soft caps, sinks and ALiBi"
        if device.type == "cuda" and attention.head_dim != ops.FP8_QUERY_HEAD_DIM:
            return f"on a GPU heads of {ops.FP8_QUERY_HEAD_DIM} are rounded, not {attention.head_dim}"
    return None


def read_key_means(folder: Path, spec: DecoderSpec) -> list[Tensor]:
    """[num_kv_heads, head_dim] fp32 of each layer. Raises ConfigError if the file is absent or of another model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / FILE
    try:
        stored = load_file(path)
    except FileNotFoundError:
        how = "make it: build/key_means.py --model … --text …"
        raise ConfigError(FIELD, FP8, f"needs {path}; {how}; accepted without it: {_OTHERS}") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(FIELD, FP8, f"{path} is not a readable safetensors file: {error}") from error
    means = []
    for index, layer in enumerate(spec.layers):
        mean = stored.get(f"layers.{index}.key_mean")
        shape = (layer.attention.num_kv_heads, layer.attention.head_dim)
        if mean is None or tuple(mean.shape) != shape or not mean.isfinite().all():
            raise ConfigError(FIELD, FP8, f"{path}: layers.{index}.key_mean must be finite numbers of shape {shape}")
        means.append(mean.float())
    return means


def write_key_means(path: Path, means: list[Tensor], about: dict[str, object]) -> None:
    """about: what they were measured on."""
    tensors = {f"layers.{index}.key_mean": mean.float().contiguous() for index, mean in enumerate(means)}
    write_tensors(tensors, path, {"about": json.dumps(about)})


def needs_key_means(config: ModelConfig, kv_dtype: torch.dtype | None) -> bool:
    """Whether keys are rounded when prompts attend: those of an FP8 cache are already."""
    return config.prefill_attention_dtype == FP8 and kv_dtype != FP8_CACHE


def attend_in_fp8(decoder: Decoder, means: list[Tensor] | None) -> None:
    """Let prompts of a loaded decoder attend in FP8. means: of all layers and heads, of which a rank takes its own;
    None over an FP8 cache."""
    for index, layer in zip(decoder.own_indices, decoder.own_layers):
        attention = layer.attention
        assert isinstance(attention, SelfAttention)
        options = attention.layer.options
        if means is None:
            options = replace(options, fp8_probs=True)
        else:
            _, own_heads = attention.spec.heads_of(decoder.context.parallel)
            options = replace(options, key_mean=means[index][own_heads].to(decoder.context.device))
        attention.layer = replace(attention.layer, options=options)


def round_queries(decoder: Decoder) -> None:
    """Let a decoder's layers do what split_kv_fp8 is: queries of long prompts may be rounded."""
    for layer in decoder.own_layers:
        attention = layer.attention
        assert isinstance(attention, SelfAttention)
        attention.layer = replace(attention.layer, options=replace(attention.layer.options, fp8_queries=True))


def zero_means(spec: DecoderSpec) -> list[Tensor]:
    """Means for models with random weights."""
    return [torch.zeros(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in spec.layers]
