"""EXAONE 4 and K-EXAONE: windows in three of four layers, and positions that only these rotate in.

EXAONE 4 has OLMo 2's places of norms and one of each query and key head; its small model has full layers only, which
all rotate. K-EXAONE has Llama's places of norms, and experts routed as in DeepSeek-V3. Source: arXiv:2507.11407.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import AttentionSpec
from slipstream.nn.models import olmo
from slipstream.nn.models.common import WINDOW, base_spec, windows_by_type, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.models.glm4_moe import MLP, NAMES, read_experts
from slipstream.nn.models.mixture import dense_layers, with_experts
from slipstream.nn.models.module_lists import ATTENTION_PARTS, MLP_PARTS
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Names

PERIOD = 4  # of layers, the last of which has no window
MOE_NAMES = {**NAMES, "selection_bias": MLP}
MTP = "mtp."  # a layer for multi-token prediction


def read_spec(config: HFConfig) -> DecoderSpec:
    spec = _base(config, (*ATTENTION_PARTS, *MLP_PARTS), olmo.NAMES)
    return spec.map_layers(lambda _, layer: replace(layer, norms="post"))


def read_moe(config: HFConfig) -> DecoderSpec:
    spec = _base(config, ATTENTION_PARTS, LLAMA_NAMES)
    config = config.renamed(n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    config = config.with_defaults(routed_scaling_factor=2.5)
    experts = read_experts(config, spec.hidden_size)
    return with_experts(config, spec, MOE_NAMES, experts, dense_layers(config, spec.num_layers, 1))


def _base(config: HFConfig, linear_parts: tuple[str, ...], names: Names) -> DecoderSpec:
    config = config.with_defaults(rms_norm_eps=1e-5).with_unstated(sliding_window=WINDOW)
    spec = base_spec(config, linear_parts, names)
    period = PERIOD if config.strings("layer_types") else config.integer("sliding_window_pattern", PERIOD)
    windows = windows_by_type(config, spec.num_layers, lambda layer: (layer + 1) % period != 0)

    def change(attention: AttentionSpec) -> AttentionSpec:
        is_rotated = attention.sliding_window is not None or not config.has("sliding_window")
        return replace(attention, qk_norm="head", rope=attention.rope if is_rotated else None)

    return with_windows(spec, windows).map_attention(change)


FAMILIES.register("Exaone4ForCausalLM")(Family(read_spec, olmo.NAMES))
for architecture in ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"):  # as published, as transformers calls it
    FAMILIES.register(architecture)(Family(read_moe, MOE_NAMES, ignored_prefixes=(MTP,)))
