"""SmolLM3: Llama in which every fourth layer does not rotate positions in (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import LayerSpec
from slipstream.nn.models import llama
from slipstream.nn.models.common import windows_by_type, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec

INTERVAL, THETA = 4, 2_000_000.0  # where a config does not state them


def read_spec(config: HFConfig) -> DecoderSpec:
    spec = llama.read_spec(config.with_defaults(tie_word_embeddings=True, rope_theta=THETA))
    rotates = _rotating_layers(config, spec.num_layers)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        return layer if rotates[index] else replace(layer, attention=replace(layer.attention, rope=None))

    spec = spec.map_layers(change)
    if not config.boolean("use_sliding_window", False):
        return spec
    return with_windows(spec, windows_by_type(config, spec.num_layers, lambda layer: not rotates[layer]))


def _rotating_layers(config: HFConfig, num_layers: int) -> list[int]:
    """1 of each layer that rotates, 0 of each other one: so no_rope_layers lists them, in spite of its name."""
    interval = config.integer("no_rope_layer_interval", INTERVAL)
    if not config.has("no_rope_layers"):
        return [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    rotates = config.integers("no_rope_layers")
    if len(rotates) != num_layers or set(rotates) - {0, 1}:
        raise config.error("no_rope_layers", f"must be {num_layers} of 0 or 1")
    return rotates


FAMILIES.register("SmolLM3ForCausalLM")(Family(read_spec, LLAMA_NAMES))
