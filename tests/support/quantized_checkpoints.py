"""A tiny checkpoint with sizes that suit quantisation, quantised variants of it, and comparisons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from paged_forward import PagedForward
from safetensors.torch import load_file, save_file
from slipstream.core.config import ModelConfig
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model
from transformers import Qwen2Config, Qwen2ForCausalLM

PROMPT = [5, 17, 3, 90, 44, 44, 2, 61]
Tensors = dict[str, torch.Tensor]


def make_full(path: Path, **fields: object) -> Path:
    """Unquantised, float32: every size a multiple of 128, biases on q, k and v, a head of its own."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **{
            "vocab_size": 96, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1,
            "eos_token_id": 2, **fields,
        }
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.3 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)
    model.save_pretrained(path)
    return path


def store(full: Path, folder: Path, quantization: dict[str, object], change: Callable[[Tensors], object]) -> Path:
    """The checkpoint with its linear layers' tensors replaced by `change`, and its config saying so."""
    folder.mkdir(exist_ok=True)
    config = json.loads((full / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    tensors = load_file(full / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def linear_names(tensors: Tensors) -> list[str]:
    """The modules of the layers' linears."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


def load(path: Path, **fields: object) -> Decoder:
    return load_model(ModelConfig(model=str(path), device="cpu", **fields))  # type: ignore[arg-type]


def logits(decoder: Decoder) -> torch.Tensor:
    return PagedForward(decoder, [PROMPT]).run([len(PROMPT)])[0]


def rms_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).square().mean() / reference.square().mean()).sqrt().item()
