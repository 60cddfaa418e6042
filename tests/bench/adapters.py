"""LoRA adapters of a benchmark: random numbers for every linear layer of a Llama-like shape, as a PEFT folder."""

from __future__ import annotations

import json
from pathlib import Path

from shapes import Shape


def names_of(count: int) -> list[str]:
    return [f"adapter-{index}" for index in range(count)]


def write_adapter(folder: Path, shape: Shape, rank: int) -> Path:
    """One for all of a benchmark's names: what is computed does not depend on the numbers."""
    import torch
    from safetensors.torch import save_file

    config = shape.config()

    def of(name: str) -> int:
        return int(str(config[name]))

    hidden, inner = of("hidden_size"), of("intermediate_size")
    head_dim = int(str(config.get("head_dim") or hidden // of("num_attention_heads")))
    queries, keys = head_dim * of("num_attention_heads"), head_dim * of("num_key_value_heads")
    modules = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    tensors = {}
    for layer in range(of("num_hidden_layers")):
        for module, (num_in, num_out) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = (torch.randn(rank, num_in) * num_in**-0.5).bfloat16()
            tensors[f"{name}.lora_B.weight"] = (torch.randn(num_out, rank) * 0.01).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [module.split(".")[1] for module in modules]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
