"""OLMo 2 and OLMo 3: norms of what attention and MLP give, not of what they take; OLMo 3 with windows in most layers.

Queries and keys are normalised over all heads at once. Source: arXiv:2501.00656.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import AttentionSpec, LayerSpec
from slipstream.nn.models.common import WINDOW, base_spec, windows_by_type, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.rope import FULL, read_local_rope, with_rope_of
from slipstream.nn.spec import DecoderSpec

NAMES = {
    **LLAMA_NAMES,
    "attention_output_norm": "model.layers.{layer}.post_attention_layernorm",
    "mlp_output_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
THETA = 500_000.0  # of OLMo 3, where no rope is stated
PERIOD = 4  # of layers, the last of which has no window


def read_spec(config: HFConfig) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, qk_norm="flat", qkv_bias=bias, o_bias=bias)
        return replace(layer, attention=attention, norms="post")

    return base_spec(config.with_defaults(rms_norm_eps=1e-5), names=NAMES).map_layers(change)


def read_olmo3(config: HFConfig) -> DecoderSpec:
    config = config.with_defaults(rope_theta=THETA).with_unstated(sliding_window=WINDOW)
    config.integer("sliding_window")  # which tells the layers of each rope apart
    spec = read_spec(with_rope_of(config, FULL))
    windows = windows_by_type(config, spec.num_layers, lambda layer: (layer + 1) % PERIOD != 0)
    theta = config.number("rope_theta")
    local = read_local_rope(config, spec.layers[0].attention.head_dim, theta)

    def change(attention: AttentionSpec) -> AttentionSpec:
        return attention if attention.sliding_window is None else replace(attention, rope=local)

    return with_windows(spec, windows).map_attention(change)


FAMILIES.register("Olmo2ForCausalLM")(Family(read_spec, NAMES))
FAMILIES.register("Olmo3ForCausalLM")(Family(read_olmo3, NAMES))
