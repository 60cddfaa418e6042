"""Gemma 3, its text: Gemma 2 without caps, with norms of queries and keys; five layers with a window to one without,
each kind with a rope of its own. Source: arXiv:2503.19786.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import HFConfig
from slipstream.nn.layer_spec import AttentionSpec
from slipstream.nn.models.common import WINDOW, windows_by_type, with_windows
from slipstream.nn.models.family import FAMILIES, Family
from slipstream.nn.models.gemma2 import NAMES, read_gemma
from slipstream.nn.models.rope import FULL, read_local_rope, with_rope_of
from slipstream.nn.spec import DecoderSpec

LOCAL_THETA, THETA = 10_000.0, 1_000_000.0
PERIOD = 6  # of layers, the last of which has no window


def read_spec(config: HFConfig) -> DecoderSpec:
    config = config.with_defaults(rope_theta=THETA).with_unstated(sliding_window=WINDOW)
    config.integer("sliding_window")  # which tells the layers of each rope apart
    spec = read_gemma(with_rope_of(config, FULL), None, None)
    period = config.integer("sliding_window_pattern", PERIOD)
    spec = with_windows(spec, windows_by_type(config, spec.num_layers, lambda layer: (layer + 1) % period != 0))
    theta = config.number("rope_local_base_freq", LOCAL_THETA)
    local = read_local_rope(config, spec.layers[0].attention.head_dim, theta)

    def change(attention: AttentionSpec) -> AttentionSpec:
        rope = attention.rope if attention.sliding_window is None else local
        return replace(attention, qk_norm="head", rope=rope)

    return spec.map_attention(change)


FAMILIES.register("Gemma3ForCausalLM")(Family(read_spec, NAMES))
