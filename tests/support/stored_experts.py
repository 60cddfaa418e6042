"""Mixtral checkpoints as AWQ, GPTQ and FP8 writers publish them, packed by plain arithmetic of their own.

Every writer replaces the linears of attention and of experts, leaves the router as it is, and returns what the stored
tensors stand for.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from quantized_checkpoints import Tensors
from transformers import MixtralConfig, MixtralForCausalLM

LINEARS = ("_proj.weight", ".kv_a_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
ROUTERS = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, lowest first
E4M3 = torch.float8_e4m3fn
Writer = Callable[[Tensors], Tensors]


def make_mixtral(path: Path, **fields: object) -> Path:
    """Unquantised, float32, every size a multiple of 128."""
    torch.manual_seed(0)
    config = MixtralConfig(
        **{
            "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "num_local_experts": 4,
            "bos_token_id": 1, "eos_token_id": 2, **fields,
        }
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return path


def linears(tensors: Tensors) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors if name.endswith(LINEARS)]


def int4(weight: torch.Tensor, group_size: int, has_zeros: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes 0..15 [out, in], scales [out, groups] of float16's values, zero-points [out, groups])."""
    groups = weight.unflatten(1, (-1, group_size or weight.shape[1]))
    least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if has_zeros:
        scales = ((largest - least) / 15).half().float()
        zeros = (-least / scales).round().clamp(0, 15)
    else:
        scales = (torch.maximum(-least, largest) / 7.5).half().float()
        zeros = torch.full_like(scales, 8)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return codes.flatten(1).int(), scales, zeros.int()


def dequantised(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    size = codes.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)


def words(nibbles: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[..., 8 n] of 0..15 -> int32 [..., n]; nibble i of a word, from the lowest bits, is its column order[i]."""
    eights = nibbles.long().unflatten(-1, (-1, 8))
    total = sum(eights[..., column] << (4 * place) for place, column in enumerate(order))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def awq(group_size: int) -> Writer:
    def write(tensors: Tensors) -> Tensors:
        held = {}
        for name in linears(tensors):
            codes, scales, zeros = int4(tensors.pop(f"{name}.weight"), group_size, has_zeros=True)
            held[f"{name}.weight"] = dequantised(codes, scales, zeros)
            tensors[f"{name}.qweight"] = words(codes.t(), AWQ_COLUMNS)
            tensors[f"{name}.qzeros"] = words(zeros.t(), AWQ_COLUMNS)
            tensors[f"{name}.scales"] = scales.t().half()
        return held

    return write


def _first_of_input(name: str) -> str:
    """The first of the modules that are multiplied together with this one."""
    for pattern, first in (
        (r"w3$", "w1"),
        (r"up_proj$", "gate_proj"),
        (r"\.(k|v|q_a)_proj$|\.kv_a_proj\w+$", ".q_proj"),
    ):
        name = re.sub(pattern, first, name)
    return name


def gptq(group_size: int, sym: bool, version: int = 1, desc_act: bool = False) -> Writer:
    """desc_act: each module has an order of its own, but those that are multiplied together share it."""

    def write(tensors: Tensors) -> Tensors:
        held = {}
        for name in linears(tensors):
            seed = zlib.crc32(_first_of_input(name).encode())
            weight = tensors.pop(f"{name}.weight")
            order = torch.arange(weight.shape[1])
            if desc_act:
                order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
            codes, scales, zeros = int4(weight[:, order], group_size, has_zeros=not sym)
            place = torch.argsort(order)
            held[f"{name}.weight"] = dequantised(codes, scales, zeros)[:, place]
            tensors[f"{name}.qweight"] = words(codes[:, place]).t()
            # version 1 stores zero-points less one, word by word: -1 of a zero-point of 0 borrows from its neighbour
            tensors[f"{name}.qzeros"] = words(zeros.t()) - (0x11111111 if version == 1 else 0)
            tensors[f"{name}.scales"] = scales.t().half()
            tensors[f"{name}.g_idx"] = (torch.arange(weight.shape[1]) // (group_size or weight.shape[1]))[place].int()
        return held

    return write


def fp8(scales: str, scale_name: str = "weight_scale", static: bool = False) -> Writer:
    """scales: one per "tensor", "channel" or "block". Static input scales differ from module to module."""

    def write(tensors: Tensors) -> Tensors:
        held = {}
        for number, name in enumerate(linears(tensors)):
            weight = tensors[f"{name}.weight"]
            if scales == "block":
                tiles = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
                spread = tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)
            else:
                tiles = weight.abs().amax(1, keepdim=True) / 448 if scales == "channel" else weight.abs().max() / 448
                spread = tiles
            values = (weight / spread).to(E4M3)
            held[f"{name}.weight"] = values.float() * spread
            tensors |= {f"{name}.weight": values, f"{name}.{scale_name}": tiles}
            if static:
                tensors[f"{name}.input_scale"] = torch.tensor(0.01 + 1e-4 * number)
        return held

    return write


def int8(tensors: Tensors) -> Tensors:
    """As compressed-tensors stores weights of a channel each, unpacked."""
    held = {}
    for name in linears(tensors):
        weight = tensors[f"{name}.weight"]
        scales = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / scales).round().to(torch.int8)
        held[f"{name}.weight"] = values.float() * scales
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scales}
    return held


def write_modelopt_config(folder: Path, quantization: dict[str, object]) -> None:
    """As ModelOpt's older exports have it: beside config.json, which says nothing."""
    content = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
