"""Baichuan and Baichuan2, 7B and 13B: Llama's layers with queries, keys and values stored as one.

The small models rotate positions, the large ones have ALiBi, which config.json does not say: the small ones state
max_position_embeddings, the large ones model_max_length alone. Baichuan2, known by its vocabulary, multiplies with rows
of length 1 in its head. Sources: arXiv:2309.10305; ALiBi: arXiv:2108.12409.
"""

from __future__ import annotations

import math
from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import AttentionSpec
from slipstream.nn.load_transforms import NormaliseRows
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Fused, Names, Stored

QKV = Fused("model.layers.{layer}.self_attn.W_pack", ("q", "k", "v"))
NAMES: Names = {**LLAMA_NAMES, **dict.fromkeys(("q", "k", "v"), QKV)}
BAICHUAN2_NAMES: Names = {**NAMES, "lm_head": Stored("lm_head", (NormaliseRows(),))}
BAICHUAN2_VOCABULARY = 125_696
HAS_ROPE = {4096: True, 5120: False}  # by hidden size, of the published models


def read_spec(config: HFConfig) -> DecoderSpec:
    has_rope = config.has("max_position_embeddings")
    published = HAS_ROPE.get(config.integer("hidden_size"), has_rope)
    if has_rope != published:
        kind = "rotations, and states max_position_embeddings" if published else "ALiBi, and states model_max_length"
        raise config.error("hidden_size", f"is that of a model with {kind}; this config does not")
    if not has_rope:
        config = config.renamed(max_position_embeddings="model_max_length")
    spec = base_spec(config.with_values(num_key_value_heads=None), names=NAMES)
    return spec if has_rope else spec.map_attention(with_alibi)


def with_alibi(attention: AttentionSpec) -> AttentionSpec:
    return replace(attention, rope=None, alibi_slopes=alibi_slopes(attention.num_q_heads))


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8i/n) of n heads, a power of two; of heads beyond, every second slope of 2n."""
    power = 1 << int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    more = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return (*slopes, *more)


def names_of(spec: DecoderSpec) -> Names:
    return BAICHUAN2_NAMES if spec.vocab_size == BAICHUAN2_VOCABULARY else NAMES


for architecture in ("BaichuanForCausalLM", "BaiChuanForCausalLM"):
    FAMILIES.register(architecture)(Family(read_spec, names_of))
