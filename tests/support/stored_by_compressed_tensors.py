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
from compressed_tensors.quantization.utils import calculate_qparams
from quantized_checkpoints import PROMPT
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
