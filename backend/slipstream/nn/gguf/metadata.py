"""The metadata of a GGUF file -> config.json of a Hugging Face checkpoint, and the names of its tensors there.

Source: the GGUF specification (ggml/docs/gguf.md). Any thread; knows no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from slipstream.core.errors import ConfigError

FIELD = "model"
# general.architecture -> (HF architecture, model_type, whether q and k rows are stored for rotation of pairs)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's frequencies, as divisors; config.json has their formula instead
# of other architectures' files, or of scalings that config.json states otherwise
_FACTORS = (
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    *(f"rope.scaling.{name}" for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")),
)
_ORIGINAL = "original_max_position_embeddings"
# Llama 3.1 and 3.2: all published checkpoints share these
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}


class Metadata:
    """The key-value pairs of one file, typed. path: for messages."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values
        self.architecture = str(self._get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise self.error(f"architecture {self.architecture} of a GGUF file; accepted: {', '.join(ARCHITECTURES)}")

    def error(self, reason: str) -> ConfigError:
        return ConfigError(FIELD, self.path, reason)

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def of_model(self, key: str, default: Any = None) -> Any:
        """A key of the architecture's own section, such as llama.block_count."""
        return self.get(f"{self.architecture}.{key}", default)

    def token_id(self, key: str) -> int | None:
        """The id of a token that the tokenizer's section names; None: it names none."""
        token_id, pieces = self.get(f"tokenizer.ggml.{key}_token_id"), self.get("tokenizer.ggml.tokens")
        if token_id is None:
            return None
        if type(token_id) is not int or token_id < 0 or (pieces is not None and token_id >= len(pieces)):
            raise self.error(f"tokenizer.ggml.{key}_token_id of the GGUF file is {token_id!r}, none of its tokens")
        return token_id

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the architecture's section; required if there is no default."""
        name = f"{self.architecture}.{key}"
        value = self._get(name) if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"{name} of the GGUF file is {value!r}; accepted: a finite number")
        return value

    def _get(self, key: str) -> Any:
        if key not in self._values:
            raise ConfigError(FIELD, self.path, f"the GGUF file has no {key}")
        return self._values[key]


def config_json(metadata: Metadata, tensors: Collection[str], rope_factors: list[float] | None) -> dict[str, Any]:
    """config.json of the same model.  tensors: names in the file.  rope_factors: of ROPE_FACTORS, if it is there.

    Raises ConfigError for experts and for rotary scalings that config.json cannot say.
    """
    architecture, model_type, _ = ARCHITECTURES[metadata.architecture]
    if metadata.of_model("expert_count"):
        raise metadata.error("mixture-of-experts GGUF files are not converted; accepted: dense models")
    _check_scales(metadata)
    num_heads = max(_plain(metadata, "attention.head_count"), 1)
    hidden_size = int(metadata.number("embedding_length"))
    head_dim = int(metadata.number("attention.key_length", hidden_size // num_heads))
    if (rotated := int(metadata.number("rope.dimension_count", head_dim))) != head_dim:
        raise metadata.error(f"rotates {rotated} of {head_dim} features of a head; accepted: all of them")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens") or range(int(metadata.number("vocab_size")))),
        "hidden_size": hidden_size,
        "intermediate_size": _plain(metadata, "feed_forward_length"),
        "num_hidden_layers": int(metadata.number("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _plain(metadata, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.number("context_length")),
        "rms_norm_eps": _float32(metadata.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _float32(metadata.number("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if metadata.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (token_id := metadata.token_id(key)) is not None:
            config[name] = token_id
    # a turn's end may be another token than a text's: generation stops at both
    if (turn := metadata.token_id("eot")) not in (None, config.get("eos_token_id")):
        config["eos_token_id"] = [turn, *([config["eos_token_id"]] if "eos_token_id" in config else [])]
    scaling = _rope_scaling(metadata, config, rope_factors)
    return {**config, "rope_scaling": scaling} if scaling else config


def _check_scales(metadata: Metadata) -> None:
    """Raise ConfigError for a part of a file, and for factors that config.json of these architectures cannot say."""
    if metadata.get("split.count", 1) not in (0, 1):
        reason = "one file of several (split.count); accepted: one file, as `llama-gguf-split --merge` writes it"
        raise metadata.error(reason)
    for key in _FACTORS:
        if metadata.number(key, 1.0) != 1:
            raise metadata.error(f"{metadata.architecture}.{key} of the GGUF file is not served; accepted: 1")


def _plain(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A number that some architectures give by layer."""
    value = metadata.of_model(key)
    if not isinstance(value, list | tuple):
        return int(metadata.number(key, default))
    if len(set(value)) != 1 or not isinstance(value[0], int):
        raise metadata.error(f"{key} differs between layers; accepted: one number for all")
    return value[0]


def _float32(value: float) -> float:
    """1e-05 of the 9.999999747378752e-06 that a 32-bit number is read as."""
    return float(f"{value:.7g}")


def _rope_scaling(metadata: Metadata, config: Mapping[str, Any], factors: list[float] | None) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(metadata, config, factors)
    kind = metadata.of_model("rope.scaling.type", "none")
    if kind in ("none", "", None):
        return None
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        if metadata.of_model("rope.scaling.original_context_length") is not None:
            scaling[_ORIGINAL] = int(metadata.number("rope.scaling.original_context_length"))
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            scaling[name] = metadata.number(f"rope.scaling.yarn_{name}", default)
        return scaling
    if kind != "linear":
        raise metadata.error(f"rotary scaling {kind} of a GGUF file; accepted: none, linear, yarn, Llama 3's")
    return scaling


def _llama3_scaling(metadata: Metadata, config: Mapping[str, Any], factors: list[float]) -> dict[str, Any]:
    """Llama 3's formula from the divisors that it gave; refused if it does not give them."""
    scaling = {"rope_type": "llama3", "factor": round(max(factors), 4), **_LLAMA3}
    head_dim, theta, original = config["head_dim"], config["rope_theta"], scaling[_ORIGINAL]
    for index, factor in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = (original / wavelength - 1.0) / 3.0  # 0 where low_freq_factor begins, 1 at high_freq_factor
        wanted = 1 / (min(max(smooth, 0.0), 1.0) + (1 - min(max(smooth, 0.0), 1.0)) / scaling["factor"])
        if len(factors) != head_dim // 2 or not math.isclose(factor, wanted, rel_tol=1e-3):
            raise metadata.error(
                f"{ROPE_FACTORS} holds other divisors than Llama 3's formula; they cannot be converted"
            )
    return scaling


def hf_name(name: str, metadata: Metadata) -> str:
    """The tensor's name in a Hugging Face checkpoint.  Raises ConfigError for one that has none there."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise metadata.error(f"tensor {name} of the GGUF file is not known to the architecture {metadata.architecture}")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def heads_of_pairs(name: str, metadata: Metadata) -> int | None:
    """How many heads' rows of this tensor are stored in the order of rotated pairs; None where rows are in order."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or not ARCHITECTURES[metadata.architecture][2] or match[2] not in ("attn_q", "attn_k"):
        return None
    num_heads = _plain(metadata, "attention.head_count")
    return num_heads if match[2] == "attn_q" else _plain(metadata, "attention.head_count_kv", num_heads)
