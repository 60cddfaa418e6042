"""ChatGLM2, ChatGLM3 and GLM-4-9B as they were published: GLM under other names, of its config and of its tensors.

Source: https://github.com/THUDM/ChatGLM2-6B; the maths is that of nn/models/glm.py.
"""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models import glm
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.rope import DEFAULT_THETA
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Fused, Names

LAYER = "transformer.encoder.layers.{layer}"
QKV = Fused(f"{LAYER}.self_attention.query_key_value", ("q", "k", "v"))
GATE_UP = Fused(f"{LAYER}.mlp.dense_h_to_4h", ("gate", "up"))
NAMES: Names = {
    "embedding": "transformer.embedding.word_embeddings",
    "input_norm": f"{LAYER}.input_layernorm",
    **dict.fromkeys(("q", "k", "v"), QKV),
    "o": f"{LAYER}.self_attention.dense",
    "post_attention_norm": f"{LAYER}.post_attention_layernorm",
    **dict.fromkeys(("gate", "up"), GATE_UP),
    "down": f"{LAYER}.mlp.dense_4h_to_h",
    "final_norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
}
NORM_EPS = 1e-5
REQUIRED = {  # what the published models have, of what their code can do
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "original_rope": True,
}


def read_spec(config: HFConfig) -> DecoderSpec:
    for key, value in REQUIRED.items():
        if config.boolean(key, value) != value:
            raise config.error(key, f"must be {str(value).lower()}")
    config = config.renamed(
        num_hidden_layers="num_layers",
        intermediate_size="ffn_hidden_size",
        vocab_size="padded_vocab_size",
        max_position_embeddings="seq_length",
        rms_norm_eps="layernorm_epsilon",
        head_dim="kv_channels",
        attention_bias="add_qkv_bias",
        num_key_value_heads="multi_query_group_num",
    )
    if not config.boolean("multi_query_attention", False):
        config = config.with_values(multi_query_group_num=config.integer("num_attention_heads"))
    config = config.with_values(rope_theta=DEFAULT_THETA * config.number("rope_ratio", 1.0), tie_word_embeddings=False)
    return glm.read_spec(config, NAMES, NORM_EPS)


for architecture in ("ChatGLMModel", "ChatGLMForConditionalGeneration"):
    FAMILIES.register(architecture)(Family(read_spec, NAMES, (".rotary_pos_emb.inv_freq",)))
