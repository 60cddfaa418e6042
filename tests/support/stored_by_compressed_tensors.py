"""Checkpoints written by the compressed-tensors library itself, with the logits of its own quantised model."""

from __future__ import annotations

from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from quantized_checkpoints import PROMPT, Tensors
from transformers import AutoModelForCausalLM


def store_compressed(
    full: Path, folder: Path, weights: dict[str, object], inputs: dict[str, object] | None, ignore: tuple[str, ...]
) -> torch.Tensor:
    """Write the checkpoint into `folder`. weights, inputs: of QuantizationArgs. Returns [num_tokens, vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=list(ignore), quantization_status=QuantizationStatus.FROZEN
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            _set_scales(module)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return logits


def compress_linears(weights: Tensors, schemes: dict[str, dict[str, object]]) -> tuple[Tensors, Tensors]:
    """(stored tensors, what they stand for) of linear layers by name, each a module of its own.

    weights: "name.weight" -> [out, in]. schemes: as QuantizationScheme takes them, by a pattern of names.
    """
    tree = torch.nn.Module()
    for name, weight in weights.items():
        *path, last = name.removesuffix(".weight").split(".")
        parent = tree
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.clone()
        parent.add_module(last, linear)
    groups = {f"group_{n}": QuantizationScheme(targets=[t], **s) for n, (t, s) in enumerate(schemes.items())}
    config = QuantizationConfig(config_groups=groups, quantization_status=QuantizationStatus.FROZEN)
    apply_quantization_config(tree, config)
    held = {}
    for name, module in tree.named_modules():
        if hasattr(module, "weight_scale"):
            _set_scales(module)
            zeros, arguments = getattr(module, "weight_zero_point", None), module.quantization_scheme.weights
            held[f"{name}.weight"] = fake_quantize(module.weight.data, module.weight_scale.data, zeros, arguments)
    ModelCompressor.from_pretrained_model(tree).compress_model(tree)
    return dict(tree.state_dict()), held


def _set_scales(module: torch.nn.Module) -> None:
    arguments, weight = module.quantization_scheme.weights, module.weight.data
    groups = weight[:, None]
    if arguments.strategy == "group":
        groups = weight.unflatten(1, (-1, arguments.group_size))
    elif arguments.strategy == "tensor":
        groups = weight.reshape(1, 1, -1)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.03)
