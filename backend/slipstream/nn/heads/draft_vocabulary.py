"""Vocabulary matrices of draft heads, in FP8 on GPUs that support it: they are most of the bytes that a draft reads,
and rounding can change only drafts, never accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.nn.decoder import Decoder
from slipstream.nn.embedding import Head
from slipstream.nn.layer_context import LayerContext
from slipstream.nn.linear import Linear
from slipstream.nn.parallel import SINGLE
from slipstream.nn.quant import QUANT_METHODS, QuantMethod


def vocabulary_method(device: torch.device, dtype: torch.dtype) -> QuantMethod:
    """The quantisation method of vocabulary matrices for drafting on a device, with activations of `dtype`."""
    is_fast = device.type == "cuda" and ops.fp8_refusal(device, dtype) is None
    return QUANT_METHODS.get("fp8" if is_fast else "none")


def vocabulary_context(context: LayerContext) -> LayerContext:
    """The layer context of a head's own vocabulary matrix."""
    return replace(context, method=vocabulary_method(context.computes_on, context.dtype))


def own_vocabulary(target: Decoder) -> Head:
    """A head's own matrix of the model's vocabulary; whole on every rank."""
    return Head(target.spec.lm_head, replace(vocabulary_context(target.context), parallel=SINGLE))


def draft_vocabulary(target: Decoder) -> Callable[[Tensor], Tensor]:
    """The model's vocabulary matrix for drafting: an FP8 copy of it, or the model's head itself, as where
    ranks share it."""
    head, context = target.lm_head, vocabulary_context(target.context)
    is_plain = isinstance(head, Linear) and head.method is QUANT_METHODS.get("none")
    if not is_plain or context.parallel.size > 1 or context.method is QUANT_METHODS.get("none"):
        return head
    assert isinstance(head, Linear)
    copy = Head(target.spec.lm_head, context)
    for _, suffix, slot in copy.slots() if context.device.type != "meta" else ():
        slot.load(head.weights[suffix][: slot.num_rows])
    return copy
