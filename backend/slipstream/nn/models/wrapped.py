"""The text of models that also see: their text_config, and their tensors under a prefix. Images are not served.

Gemma 3 from 4B on, Mistral Small 3.1 and 3.2, Ministral 3, Kimi K2.5 and K2.6 are published so.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.nn.hf_config import DTYPE_KEYS, QUANTIZATION, HFConfig
from slipstream.nn.models import deepseek, gemma3, mistral
from slipstream.nn.models.family import FAMILIES, LLAMA_NAMES, Family
from slipstream.nn.spec import DecoderSpec

PREFIXES = (
    ("language_model.model.", "model."),  # as published
    ("model.language_model.", "model."),  # as transformers 5 saves it
    ("language_model.lm_head.", "lm_head."),
)
OTHER_PARTS = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector", "mm_projector")
)
OF_THE_WHOLE = ("architectures", *DTYPE_KEYS, "eos_token_id", "bos_token_id", QUANTIZATION)
GEMMA3_DEFAULTS = {  # what Gemma's text_config leaves out: those of transformers' Gemma3TextConfig
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def text_of(config: HFConfig, **defaults: object) -> HFConfig:
    """The config of the text model, with what the whole says of it."""
    section = config.section("text_config")
    if section is None:
        raise config.error("text_config", "is missing")
    whole = {key: config.values[key] for key in OF_THE_WHOLE if config.has(key)}
    text = replace(section, values={**section.values, **whole}, generation=config.generation)
    return text.with_defaults(tie_word_embeddings=config.values.get("tie_word_embeddings"), **defaults)


def read_gemma3(config: HFConfig) -> DecoderSpec:
    return gemma3.read_spec(text_of(config, **GEMMA3_DEFAULTS))


def read_mistral3(config: HFConfig) -> DecoderSpec:
    text = text_of(config)
    is_ministral3 = text.string("model_type", "mistral") == "ministral3"
    return mistral.read_ministral3(text) if is_ministral3 else mistral.read_spec(text)


def read_kimi(config: HFConfig) -> DecoderSpec:
    return deepseek.read_v3(text_of(config))


for architecture, reader, names in (
    ("Gemma3ForConditionalGeneration", read_gemma3, gemma3.NAMES),
    ("Mistral3ForConditionalGeneration", read_mistral3, LLAMA_NAMES),
    ("KimiK25ForConditionalGeneration", read_kimi, deepseek.V3_NAMES),
    ("Kimi_K25ForConditionalGeneration", read_kimi, deepseek.V3_NAMES),  # as transformers calls it
):
    made = Family(reader, names, ignored_prefixes=OTHER_PARTS, prefixes=PREFIXES)
    FAMILIES.register(architecture)(made)
