"""Phi-3 and Phi-4: queries, keys and values are stored as one, gate and up too; long contexts by LongRoPE's factors."""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.glm import GATE_UP
from slipstream.nn.models.mistral import with_one_window
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Fused, Names

QKV = Fused("model.layers.{layer}.self_attn.qkv_proj", ("q", "k", "v"))
NAMES: Names = {
    **LLAMA_NAMES,
    **dict.fromkeys(("q", "k", "v"), QKV),
    **dict.fromkeys(("gate", "up"), GATE_UP),
}
ORIGINAL_LENGTH = 4096  # of longrope, where no length is stated
ROPE_TYPES = ("default", "longrope")


def read_spec(config: HFConfig) -> DecoderSpec:
    config = config.with_defaults(rms_norm_eps=1e-5)
    section = config.section("rope_scaling") or config.section("rope_parameters")
    if section is not None and not section.has("original_max_position_embeddings"):
        config = config.with_defaults(original_max_position_embeddings=ORIGINAL_LENGTH)
    spec = base_spec(config, names=NAMES, rotated_part=1.0)
    rope = spec.layers[0].attention.rope
    if rope is not None and rope.type not in ROPE_TYPES:
        raise config.error("rope_scaling", f"rope type {rope.type} is none of this family's: {', '.join(ROPE_TYPES)}")
    return with_one_window(config, spec)


FAMILIES.register("Phi3ForCausalLM")(Family(read_spec, NAMES))
