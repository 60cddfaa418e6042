"""PEFT folders with random adapters for a checkpoint, and the checkpoint with an adapter merged into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    checkpoint: Path,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    size: float = 0.5,
    **config: object,
) -> Path:
    """size: of the change, as a share of the weights' own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.endswith(tuple(f"{module}.weight" for module in modules)):
            module = "base_model.model." + name.removesuffix(".weight")
            a = torch.randn(rank, weight.shape[1], generator=generator)
            b = torch.randn(weight.shape[0], rank, generator=generator)
            tensors[f"{module}.lora_A.weight"] = a * weight.std() * size
            tensors[f"{module}.lora_B.weight"] = b / rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def merged(folder: Path, checkpoint: Path, adapter: Path, scale: float = 1.0) -> Path:
    """W + scale * B A, computed by hand."""
    shutil.copytree(checkpoint, folder)
    weights, pairs = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in pairs.items():
        if ".lora_A." in name:
            own = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            b = pairs[name.replace(".lora_A.", ".lora_B.")]
            weights[own] = (weights[own].double() + scale * b.double() @ a.double()).float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
