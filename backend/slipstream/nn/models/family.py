"""What a model family is: a reader from Hugging Face config to DecoderSpec, and a checkpoint name map.

Families register themselves by plain import (nn/models/__init__.py); code for a family exists only where its maths
differs, and then lives in the decoder behind a field of the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipstream.core.registry import Registry
from slipstream.nn.hf_config import HFConfig
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_names import Name, Names

# Module name of the decoder -> name in the checkpoint; shared by every family that follows Llama's layout.
LLAMA_NAMES: Mapping[str, Name] = {
    "embedding": "model.embed_tokens",
    "input_norm": "model.layers.{layer}.input_layernorm",
    "q": "model.layers.{layer}.self_attn.q_proj",
    "k": "model.layers.{layer}.self_attn.k_proj",
    "v": "model.layers.{layer}.self_attn.v_proj",
    "q_norm": "model.layers.{layer}.self_attn.q_norm",
    "k_norm": "model.layers.{layer}.self_attn.k_norm",
    "o": "model.layers.{layer}.self_attn.o_proj",
    "post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "gate": "model.layers.{layer}.mlp.gate_proj",
    "up": "model.layers.{layer}.mlp.up_proj",
    "down": "model.layers.{layer}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}


@dataclass(frozen=True)
class Family:
    """names: as LLAMA_NAMES, or what makes them of a spec.

    ignored_suffixes: of tensors in old checkpoints that carry no weights (rotary buffers). ignored_prefixes: of tensors
    that the decoder does not have. prefixes: (stored, of names) of models that are part of another one. has_mtp_layers:
    layers behind the decoder's may be MTP modules, as stored_names.mtp_layers finds them. mtp_hands_on: what such a
    module gives its own next pass, its "normed" result or that before the norm of its head, "raw".
    """

    read_spec: Callable[[HFConfig], DecoderSpec]
    names: Names | Callable[[DecoderSpec], Names]
    ignored_suffixes: tuple[str, ...] = (".rotary_emb.inv_freq",)
    ignored_prefixes: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    has_mtp_layers: bool = False
    mtp_hands_on: str = "normed"

    def read_as(self, stored: str) -> str:
        """What `names` calls a tensor of a checkpoint."""
        own = next((pair for pair in self.prefixes if stored.startswith(pair[0])), ("", ""))
        return own[1] + stored.removeprefix(own[0])

    def names_of(self, spec: DecoderSpec) -> Names:
        return self.names(spec) if callable(self.names) else self.names


FAMILIES: Registry[Family] = Registry("architecture")
