"""The part of a Hugging Face config that all Llama-like families share, and the refusals they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from slipstream.nn.hf_config import DTYPE_KEYS, HFConfig
from slipstream.nn.layer_spec import AttentionSpec, DenseSpec, LayerSpec
from slipstream.nn.models.family import LLAMA_NAMES
from slipstream.nn.models.module_lists import ATTENTION_PARTS, MLP_PARTS, linear_modules
from slipstream.nn.models.quantization import read_stored_format
from slipstream.nn.models.rope import FULL, SLIDING, read_rope, within_first_chunk
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WINDOW = 4096  # of families whose layers may have one, where the config does not state it
MAX_LAYERS, MAX_HEADS = 1024, 65_536  # beyond all published models; lists of as many entries are made of a config
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def base_spec(
    config: HFConfig,
    linear_parts: tuple[str, ...] = (*ATTENTION_PARTS, *MLP_PARTS),
    names: Names = LLAMA_NAMES,
    rotated_part: float | None = None,
    is_interleaved: bool = False,
) -> DecoderSpec:
    """Equal layers without biases, query/key norms or windows; a family replaces what differs. Raises ConfigError.

    linear_parts: those that one method holds. names: the family's. rotated_part: as read_rope takes it.
    is_interleaved: as RopeSpec has it.
    """
    hidden_size = config.integer("hidden_size")
    num_q_heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads={num_q_heads}")
    if not config.has("head_dim") and hidden_size % num_q_heads:
        raise config.error("num_attention_heads", f"must divide hidden_size={hidden_size}")
    head_dim = config.integer("head_dim", hidden_size // num_q_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"rotary embedding needs an even head size, not {head_dim}")
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    rope = within_first_chunk(config, read_rope(config, head_dim, rotated_part))
    bos_token_ids = config.token_ids("bos_token_id")
    attention = AttentionSpec(
        hidden_size=hidden_size,
        num_inputs=hidden_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=replace(rope, is_interleaved=is_interleaved),
    )
    mlp = DenseSpec(hidden_size, config.integer("intermediate_size"), activation_of(config))
    return DecoderSpec(
        architecture=config.strings("architectures")[0],
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=(LayerSpec(attention, mlp),) * num_layers,
        max_position_embeddings=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        dtype=_checkpoint_dtype(config),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=config.token_ids("eos_token_id"),
        stored_format=read_stored_format(config, linear_modules(names, linear_parts, range(num_layers))),
    )


def activation_of(config: HFConfig) -> str:
    """That of a dense MLP's gate, as DenseSpec names it."""
    return ACTIVATIONS[config.choice("hidden_act", tuple(ACTIVATIONS), "silu")]


def with_biases(spec: DecoderSpec, qkv: bool = False, o: bool = False, mlp: bool = False) -> DecoderSpec:
    """Which linear layers of a dense model add a bias."""

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, DenseSpec)
        attention = replace(layer.attention, qkv_bias=qkv, o_bias=o)
        return replace(layer, attention=attention, mlp=replace(layer.mlp, bias=mlp))

    return spec.map_layers(change)


def with_windows(spec: DecoderSpec, windows: Sequence[int | None]) -> DecoderSpec:
    """windows: of each layer."""

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, sliding_window=windows[index]))

    return spec.map_layers(change)


def sliding_windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """Windows of the Qwen families, when use_sliding_window: by layer_types, or else from max_window_layers on."""
    if not config.boolean("use_sliding_window", False):
        return (None,) * num_layers
    first = config.integer("max_window_layers", 28, minimum=0)
    config = config.with_unstated(sliding_window=WINDOW)
    return windows_by_type(config, num_layers, lambda layer: layer >= first)


def windows_by_type(config: HFConfig, num_layers: int, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """sliding_window in the layers that layer_types calls sliding_attention or, without such a list, is_sliding."""
    if not config.has("sliding_window"):
        return (None,) * num_layers
    window = config.integer("sliding_window")
    layer_types = config.strings("layer_types")
    if not layer_types:
        return tuple(window if is_sliding(layer) else None for layer in range(num_layers))
    if len(layer_types) != num_layers or set(layer_types) - {FULL, SLIDING}:
        raise config.error("layer_types", f"must be {num_layers} of {FULL} or {SLIDING}")
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _checkpoint_dtype(config: HFConfig) -> torch.dtype:
    key = next((key for key in DTYPE_KEYS if config.has(key)), DTYPE_KEYS[0])
    return DTYPES[config.choice(key, tuple(DTYPES), "float32")]
