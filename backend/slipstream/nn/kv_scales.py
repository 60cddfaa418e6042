"""Scales of an FP8 KV cache stored in a checkpoint: their names, and the slots that load them.

Names by tool: llm-compressor and vLLM self_attn.k_scale and self_attn.attn.k_scale, ModelOpt self_attn.k_proj.k_scale,
AutoFP8 self_attn.k_proj.output_scale, or self_attn.kv_scale for both. All mean value = stored * scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import partial

from slipstream.nn.latent_attention import LatentAttention
from slipstream.nn.self_attention import SelfAttention
from slipstream.nn.weight_slot import WeightSlot

_NAME = re.compile(
    r".*\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.)?(?P<own>k|v|kv)_scale|(?P<proj>[kv])_proj\.(?:(?P=proj)_scale|output_scale))"
)
# Scales of quantised queries and probabilities, which are not supported.
UNUSED_SUFFIXES = (".q_scale", ".prob_scale", ".output_scale", ".prob_output_scale")


def kv_scale_slots(
    attentions: list[SelfAttention | LatentAttention], shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> dict[str, WeightSlot]:
    """Name -> slot of every KV scale of a checkpoint; a scale for both comes first, so that a scale of only keys or
    values overrides it."""
    found: dict[str, WeightSlot] = {}
    for name, shape in shapes:
        match = _NAME.fullmatch(name)
        if match is None or int(match["layer"]) >= len(attentions):
            continue
        attention = attentions[int(match["layer"])]
        if isinstance(attention, LatentAttention):  # whose FP8 rows have scales of their own
            continue
        part = match["own"] or match["proj"]
        expected = shape if math.prod(shape) == 1 else (attention.spec.num_kv_heads,)
        found[name] = WeightSlot(expected, partial(attention.load_kv_scale, part), mean=1.0, std=0.0)
    return dict(sorted(found.items(), key=lambda item: not item[0].endswith(".kv_scale")))
