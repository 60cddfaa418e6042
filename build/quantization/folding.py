"""Folds factors per input feature of a linear layer into its source; the model's function does not change.

The source of qkv and gate_up is a norm's weight; of o the rows of v; of down the rows of up. Experts and the router
share the norm; each expert has its own up.
"""

from __future__ import annotations

from slipstream.nn.decoder import DecoderLayer
from slipstream.nn.experts import Experts
from slipstream.nn.linear import Linear
from slipstream.nn.spec import DecoderSpec
from torch import Tensor


def shared(spec: DecoderSpec, layer: DecoderLayer, linear: Linear, factors: Tensor) -> Tensor:
    """The factors [in], averaged (geometric mean) over input features from the same row: heads that share a v."""
    if linear is not layer.attention.o:
        return factors
    heads = factors.log().view(layer.attention.spec.num_kv_heads, -1, layer.attention.spec.head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1).exp()


def fold(spec: DecoderSpec, layer: DecoderLayer, linear: Linear, factors: Tensor) -> None:
    """Multiply the linear's columns by `factors` (from `shared`) and divide their source by them.

    factors: [in]; of experts' down [num_experts, in].
    """
    linear.weights["weight"].mul_(factors if factors.dim() == 1 else factors[:, None])
    if linear is layer.attention.qkv:
        layer.input_norm.weight.div_(factors)
    elif linear is layer.mlp.gate_up:
        layer.post_attention_norm.weight.div_(factors)
        if isinstance(layer.mlp, Experts):
            layer.mlp.router.weights["weight"].mul_(factors)
    elif linear is layer.mlp.down:
        for part, _ in linear.spec.parts:
            own = factors if factors.dim() == 1 else factors[expert_of(part)]
            _divide_rows(layer.mlp.gate_up, part.replace("down", "up"), own)
    else:
        own = layer.attention.spec
        per_head = factors.view(own.num_kv_heads, -1, own.head_dim)[:, 0].reshape(-1)
        _divide_rows(layer.attention.qkv, "v", per_head)


def expert_of(part: str) -> int:
    """The expert of a part: 3 for "gate.3"; 0 for parts outside of experts."""
    return int(part.partition(".")[2] or 0)


def weight_of(linear: Linear, part: str) -> Tensor:
    """The part's rows, [rows, in], of unquantised weights."""
    return linear.weights["weight"].view(-1, linear.spec.in_features)[rows_of(linear, part)]


def rows_of(linear: Linear, part: str) -> slice:
    """The rows of a part in its merged layer."""
    start = 0
    for name, rows in linear.spec.parts:
        if name == part:
            return slice(start, start + rows)
        start += rows
    raise KeyError(part)


def _divide_rows(source: Linear, part: str, factors: Tensor) -> None:
    weight_of(source, part).div_(factors[:, None])
    if "bias" in source.weights:
        source.weights["bias"][rows_of(source, part)].div_(factors)
