"""Imported by vLLM's engine process (worker_extension_cls): random bits in dummy weights of integer and FP8 types.

vLLM's dummy loader leaves integer weights as they were allocated, mostly zeros, and draws FP8 weights so small that
they round to zero. A GPU multiplies zeros at a higher clock: the rival would look faster than it is. Its weights of
norms and routers are so small (1e-3) that all experts get the same probability, and all tokens the first few experts:
a step then reads a tenth of the weights that it reads of a real model. So norms are 1 and matrices as large as ours.
Scales of MXFP4 are exponents: random bits would be powers of two up to 2^128, whose products are NaN, which chooses the
same experts for all tokens, too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader import dummy_loader, weight_utils

_E8M0_SCALES = (115, 123)  # exponents of 2^-12 to 2^-5
_LARGER = 35  # uniform in +-1e-3 becomes as wide as normal of 0.02
_draw = weight_utils.initialize_single_dummy_weight
_draw_module = dummy_loader.initialize_dummy_weights


class Fill:
    """What worker_extension_cls asks for; importing this module is the effect."""


def _fill(param: torch.Tensor, *args: Any, **options: Any) -> None:
    weight = param.data
    if weight.dim() >= 2 and weight.is_contiguous() and weight.dtype in (torch.int32, torch.int8, torch.uint8):
        weight.view(torch.uint8).random_(0, 256)
    elif weight.dim() >= 2 and weight.dtype == torch.float8_e4m3fn:
        weight.copy_((torch.randn(weight.shape, device=weight.device, dtype=torch.float16) * 64).clamp_(-448, 448))
    elif weight.numel() > 1:  # a single number is a scale, whose default means 1
        _draw(param, *args, **options)
        if weight.dtype == torch.bfloat16:
            weight.fill_(1.0) if weight.dim() == 1 else weight.mul_(_LARGER)


def _fill_module(module: torch.nn.Module, *args: Any, **options: Any) -> None:
    _draw_module(module, *args, **options)
    for name, param in module.named_parameters():
        if name.endswith("weight_scale") and param.dtype == torch.uint8:
            param.data.random_(*_E8M0_SCALES)


weight_utils.initialize_single_dummy_weight = _fill
dummy_loader.initialize_single_dummy_weight = _fill
dummy_loader.initialize_dummy_weights = _fill_module
