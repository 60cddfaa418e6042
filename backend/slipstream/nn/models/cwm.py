"""CWM (Code World Model): Llama with windows in three of four layers. Source: arXiv:2510.02387."""

from __future__ import annotations

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models.common import base_spec, windows_by_type, with_biases, with_windows
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec

PERIOD = 4  # of layers, the first of which has no window
# what a config that does not state it means
HEAD_DIM, WINDOW, THETA = 128, 8192, 1_000_000.0
SCALING = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


def read_spec(config: HFConfig) -> DecoderSpec:
    if config.boolean("attention_bias", False):
        raise config.error("attention_bias", "must be false in this architecture")
    config = config.with_defaults(rms_norm_eps=1e-5, rope_theta=THETA)
    config = config.with_unstated(head_dim=HEAD_DIM, sliding_window=WINDOW)
    if not (config.has("rope_scaling") or config.has("rope_parameters")):
        config = config.with_values(rope_scaling=SCALING)
    spec = with_biases(base_spec(config), mlp=config.boolean("mlp_bias", False))
    return with_windows(spec, windows_by_type(config, spec.num_layers, lambda layer: layer % PERIOD != 0))


FAMILIES.register("CwmForCausalLM")(Family(read_spec, LLAMA_NAMES))
