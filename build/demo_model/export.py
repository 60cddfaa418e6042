"""Join what training left into a Hugging Face checkpoint: config.json, model.safetensors, generation_config.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from slipstream.nn.tensor_file import write_tensors

from demo_model.network import Network, NetworkConfig


def read_weights(train_dir: Path) -> tuple[NetworkConfig, dict[str, torch.Tensor]]:
    """The bfloat16 tensors of a finished or interrupted training; raises ValueError if parts are missing."""
    record = json.loads((train_dir / "train.json").read_text())
    raw = b"".join(path.read_bytes() for path in sorted(train_dir.glob("weights-*.bin")))
    if len(raw) != record["num_bytes"]:
        raise ValueError(f"{train_dir}: weights-*.bin hold {len(raw)} bytes, train.json says {record['num_bytes']}")
    flat = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16)
    sizes = [math.prod(shape) for shape in record["tensors"].values()]
    parts = flat.split(sizes)
    tensors = {name: part.view(shape).clone() for (name, shape), part in zip(record["tensors"].items(), parts)}
    return NetworkConfig(**record["network"]), tensors


def random_weights(config: NetworkConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of an untrained network, every matrix drawn (nothing zero): a stand-in to develop against."""
    torch.manual_seed(seed)
    tensors = {name: p.detach().clone() for name, p in Network(config).named_parameters()}
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.normal_(std=0.02)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def export(config: NetworkConfig, tensors: dict[str, torch.Tensor], model_dir: Path) -> Path:
    """Write the checkpoint's files beside the tokenizer's; returns the weights' path."""
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config.to_hugging_face(), indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
    (model_dir / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    path = model_dir / "model.safetensors"
    write_tensors(tensors, path)
    return path
