"""Random heads for the tiny Llama of tiny_model.py, in the layouts in which such heads are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from slipstream.core.config import SpeculationConfig
from speculation_config import speculation_config

Tensors = dict[str, torch.Tensor]
EAGLE = {"eagle_top_k": 4, "eagle_depth": 3}


class _Draw:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, std: float = 0.2) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * std


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _layer(config: dict[str, Any], draw: _Draw, prefix: str, num_inputs: int) -> Tensors:
    """Attention, MLP and the norm between them, of a Llama layer."""
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_q, num_kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{prefix}self_attn.q_proj.weight": draw(num_q, num_inputs),
        f"{prefix}self_attn.k_proj.weight": draw(num_kv, num_inputs),
        f"{prefix}self_attn.v_proj.weight": draw(num_kv, num_inputs),
        f"{prefix}self_attn.o_proj.weight": draw(size, num_q),
        f"{prefix}mlp.gate_proj.weight": draw(inner, size),
        f"{prefix}mlp.up_proj.weight": draw(inner, size),
        f"{prefix}mlp.down_proj.weight": draw(size, inner),
        f"{prefix}post_attention_layernorm.weight": 1 + draw(size),
    }


def make_medusa(model: Path, folder: Path, num_heads: int = 3, is_pickled: bool = False, own_head: bool = True) -> Path:
    """FasterDecoding's medusa_lm_head.pt, or the same names in safetensors with `medusa_head.` in front."""
    config, draw = _config(model), _Draw(1)
    size, tensors = config["hidden_size"], {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = draw(size, size)
        tensors[f"{head}.0.linear.bias"] = draw(size)
        if own_head:
            tensors[f"{head}.1.weight"] = draw(config["vocab_size"], size)
    folder.mkdir(parents=True, exist_ok=True)
    if is_pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file({f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, folder / "heads.safetensors")
    return folder


def make_mtp(model: Path, folder: Path) -> Path:
    """The tensors that DeepSeek-V3 stores behind its last layer."""
    config, draw = _config(model), _Draw(2)
    size = config["hidden_size"]
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = _layer(config, draw, prefix, size)
    tensors[f"{prefix}input_layernorm.weight"] = 1 + draw(size)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = 1 + draw(size)
    tensors[f"{prefix}eh_proj.weight"] = draw(size, 2 * size)
    tensors[f"{prefix}embed_tokens.weight"] = draw(config["vocab_size"], size)
    tensors[f"{prefix}shared_head.head.weight"] = draw(config["vocab_size"], size)
    if config["model_type"] == "qwen2":  # whose layers have biases there
        projections = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        tensors |= {f"{name}.bias": draw(len(tensors[f"{name}.weight"])) for name in projections}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_eagle(model: Path, folder: Path) -> Path:
    """EAGLE and EAGLE-2: pytorch_model.bin with a projection with bias, and a layer without input norm."""
    config, draw = _config(model), _Draw(3)
    size = config["hidden_size"]
    tensors = _layer(config, draw, "layers.0.", size)
    tensors |= {"fc.weight": draw(size, 2 * size), "fc.bias": draw(size)}
    tensors["embed_tokens.weight"] = draw(config["vocab_size"], size)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


def make_eagle3(model: Path, folder: Path) -> Path:
    """EAGLE-3: `midlayer`, a head over part of the vocabulary and the maps d2t, t2d."""
    config, draw = _config(model), _Draw(4)
    size, vocab = config["hidden_size"], config["vocab_size"]
    tensors = _layer(config, draw, "midlayer.", 2 * size)
    for name in ("hidden_norm", "input_layernorm"):
        tensors[f"midlayer.{name}.weight"] = 1 + draw(size)
    chosen = torch.arange(0, vocab, 2)
    tensors |= {"fc.weight": draw(size, 3 * size), "norm.weight": 1 + draw(size)}
    tensors |= {"lm_head.weight": draw(len(chosen), size), "d2t": chosen - torch.arange(len(chosen))}
    tensors["t2d"] = torch.arange(vocab) % 2 == 0
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    written = {**config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def speculation(method: str, model: Path, folder: Path) -> SpeculationConfig:
    """A configuration of one method; its heads are made in the folder."""
    made = {
        "ngram": lambda: ("ngram", {}),
        "draft_model": lambda: ("draft_model", {"draft_model": str(model), "draft_sampling": "sampled"}),
        "medusa": lambda: ("medusa", {"medusa_heads": str(make_medusa(model, folder))}),
        "mtp": lambda: ("mtp", {"mtp_module": str(make_mtp(model, folder))}),
        "eagle": lambda: ("eagle", {**EAGLE, "eagle_head": str(make_eagle(model, folder))}),
        "eagle3": lambda: ("eagle", {**EAGLE, "eagle_head": str(make_eagle3(model, folder))}),
    }
    name, fields = made[method]()
    return speculation_config(name, throttle="off", **fields)  # type: ignore[arg-type]
