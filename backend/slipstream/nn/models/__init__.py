"""The served model families, filled by plain imports; an architecture is looked up as config.json names it."""

from __future__ import annotations

from slipstream.core.errors import ConfigError
from slipstream.nn.hf_config import HFConfig
from slipstream.nn.models import (  # noqa: F401  (each registers itself)
    baichuan,
    chatglm,
    cwm,
    deepseek,
    dots1,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granite_moe,
    hunyuan,
    hyperclovax,
    internlm3,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    solar_open,
    wrapped,
)
from slipstream.nn.models.family import FAMILIES, Family


def family_of(config: HFConfig) -> Family:
    """The family of a checkpoint. Raises ConfigError naming its architecture and those that are served."""
    architectures = config.strings("architectures")
    if not architectures:
        accepted = ", ".join(sorted(FAMILIES.names()))
        raise ConfigError("config.json architectures", None, f"is missing; accepted: {accepted}")
    if architectures[0] not in FAMILIES.names():
        accepted = ", ".join(sorted(FAMILIES.names()))
        reason = f"models of this architecture are not served; served are {accepted}"
        raise ConfigError("config.json architectures", architectures[0], reason)
    return FAMILIES.get(architectures[0])
