"""Gemma 2: capped scores and logits, a window in every other layer, norms of 1 + w on both sides of attention and MLP.

Source: arXiv:2408.00118.
"""

from __future__ import annotations

import math
from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import LayerSpec
from slipstream.nn.load_transforms import AddOne
from slipstream.nn.models.common import WINDOW, base_spec, windows_by_type, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names, Stored

LAYER = "model.layers.{layer}"
NORMS = {
    "input_norm": f"{LAYER}.input_layernorm",
    "attention_output_norm": f"{LAYER}.post_attention_layernorm",
    "post_attention_norm": f"{LAYER}.pre_feedforward_layernorm",
    "mlp_output_norm": f"{LAYER}.post_feedforward_layernorm",
    "q_norm": f"{LAYER}.self_attn.q_norm",
    "k_norm": f"{LAYER}.self_attn.k_norm",
    "final_norm": "model.norm",
}
NAMES: Names = {**LLAMA_NAMES, **{module: Stored(name, (AddOne(),)) for module, name in NORMS.items()}}
SCORE_CAP, LOGIT_CAP = 50.0, 30.0


def read_spec(config: HFConfig) -> DecoderSpec:
    config = config.with_unstated(sliding_window=WINDOW)
    spec = read_gemma(config, SCORE_CAP, LOGIT_CAP)
    return with_windows(spec, windows_by_type(config, spec.num_layers, lambda layer: layer % 2 == 0))


def read_gemma(config: HFConfig, score_cap: float | None, logit_cap: float | None) -> DecoderSpec:
    """What Gemma 2 and Gemma 3 share. The caps: where the config does not say."""
    if config.boolean("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "must be false: tokens see none after them")
    config = config.renamed(hidden_act="hidden_activation").with_defaults(
        hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, head_dim=256
    )
    bias = config.boolean("attention_bias", False)
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    cap = config.number_or_none("attn_logit_softcapping", score_cap)

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, scale=scale, soft_cap=cap, qkv_bias=bias, o_bias=bias)
        return replace(layer, attention=attention, norms="both")

    spec = base_spec(config, names=NAMES).map_layers(change)
    logit_cap = config.number_or_none("final_logit_softcapping", logit_cap)
    return replace(spec, embedding_scale=math.sqrt(spec.hidden_size), logit_soft_cap=logit_cap)


FAMILIES.register("Gemma2ForCausalLM")(Family(read_spec, NAMES))
