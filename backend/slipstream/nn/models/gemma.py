"""Gemma 1: Llama with norms of 1 + w, embeddings scaled by the root of their size, and gelu in the MLP.

Source: arXiv:2403.08295.
"""

from __future__ import annotations

import math
from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.load_transforms import AddOne
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names, Stored

NORMS = {module: str(LLAMA_NAMES[module]) for module in ("input_norm", "post_attention_norm", "final_norm")}
NAMES: Names = {**LLAMA_NAMES, **{module: Stored(name, (AddOne(),)) for module, name in NORMS.items()}}
GELU = "gelu_pytorch_tanh"


def read_spec(config: HFConfig) -> DecoderSpec:
    if config.boolean("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "must be false: tokens see none after them")
    for key in ("hidden_act", "hidden_activation"):
        config.choice(key, ("gelu", GELU), GELU)  # the first configs say gelu, and mean this one
    config = config.with_values(hidden_act=GELU).with_defaults(tie_word_embeddings=True, head_dim=256)
    bias = config.boolean("attention_bias", False)
    spec = base_spec(config, names=NAMES).map_attention(lambda own: replace(own, qkv_bias=bias, o_bias=bias))
    return replace(spec, embedding_scale=math.sqrt(spec.hidden_size))


FAMILIES.register("GemmaForCausalLM")(Family(read_spec, NAMES))
