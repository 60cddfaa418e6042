"""Folds factors per input feature of linear layers into their source; the model's function does not change.

The source of products of normed inputs is that norm's weight; of o the rows of v, or of a latent's values; of down the
rows of up. Experts, the router, shared experts and their gate read one norm; each expert has its own up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from slipstream.nn.decoder import DecoderLayer
from slipstream.nn.experts import Experts
from slipstream.nn.latent_attention import LatentAttention
from slipstream.nn.layer_spec import AttentionSpec
from slipstream.nn.linear import Linear
from slipstream.nn.mlp import MLP
from slipstream.nn.self_attention import SelfAttention
from torch import Tensor


@dataclass(frozen=True)
class InputGroup:
    """Linears of one input. divide: divides the input's source by factors that `shared` has made.

    linears: those that a method holds. kept: those that are never quantised. shared: averages factors that fall on the
    same row of the source. per_expert: each expert of the one linear has an input, and factors, of its own.
    """

    linears: tuple[Linear, ...]
    divide: Callable[[Tensor], object]
    kept: tuple[Linear, ...] = ()
    shared: Callable[[Tensor], Tensor] = lambda factors: factors
    per_expert: bool = False


def input_groups(layer: DecoderLayer) -> tuple[InputGroup, ...]:
    """Those of a layer, each behind the ones whose weights it divides. An input without a norm before it has none."""
    return (*_of_attention(layer), *_of_mlp(layer))


def kept_linears(layer: DecoderLayer) -> dict[str, Linear]:
    """A router and the gate of shared experts, by module: never quantised, but changed where factors are folded."""
    if not isinstance(layer.mlp, Experts):
        return {}
    gate = layer.mlp.shared_gate
    return {"router": layer.mlp.router, **({} if gate is None else {"shared_expert_gate": gate})}


def fold(group: InputGroup, factors: Tensor) -> None:
    """Multiply the columns of the group's linears by `factors` (from `shared`) and divide their source by them.

    factors: [in]; [num_experts, in] if per_expert.
    """
    for linear in (*group.linears, *group.kept):
        linear.weights["weight"].mul_(factors if factors.dim() == 1 else factors[:, None])
    group.divide(factors)


def _of_attention(layer: DecoderLayer) -> Iterator[InputGroup]:
    attention = layer.attention
    if layer.input_norm is not None:
        yield InputGroup((attention.qkv,), layer.input_norm.weight.div_)
    if isinstance(attention, SelfAttention):
        yield InputGroup((attention.o,), partial(_divide_v, attention), shared=partial(_by_head, attention.spec))
        return
    if attention.q_b is not None:
        yield InputGroup((attention.q_b,), attention.norms[0].weight.div_)
    yield InputGroup((attention.o,), partial(_divide_latent_values, attention))


def _of_mlp(layer: DecoderLayer) -> Iterator[InputGroup]:
    own = layer.mlp
    shared = own.shared if isinstance(own, Experts) else None
    both: tuple[MLP | Experts, ...] = (own,) if shared is None else (own, shared)
    if layer.post_attention_norm is not None:
        kept = tuple(kept_linears(layer).values())
        yield InputGroup(tuple(one.gate_up for one in both), layer.post_attention_norm.weight.div_, kept)
    for one in both:
        yield InputGroup((one.down,), partial(_divide_up, one), per_expert=isinstance(one, Experts))


def _by_head(own: AttentionSpec, factors: Tensor) -> Tensor:
    """The geometric mean over query heads that share a head of v, for each of its features. factors: [in]."""
    heads = factors.log().view(own.num_kv_heads, -1, own.head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1).exp()


def _divide_v(attention: SelfAttention, factors: Tensor) -> None:
    own = attention.spec
    per_head = factors.view(own.num_kv_heads, -1, own.head_dim)[:, 0].reshape(-1)
    _divide_rows(attention.qkv, "v", per_head)


def _divide_latent_values(attention: LatentAttention, factors: Tensor) -> None:
    """Each query head has values of its own, in the rows of kv_b behind those of its keys."""
    latent = attention.spec.latent
    assert latent is not None
    heads = attention.kv_b.matrix.unflatten(0, (-1, latent.nope_dim + latent.value_dim))
    heads[:, latent.nope_dim :].div_(factors.view(heads.shape[0], -1, 1))


def _divide_up(mlp: MLP | Experts, factors: Tensor) -> None:
    for part, _ in mlp.down.spec.parts:
        own = factors if factors.dim() == 1 else factors[expert_of(part)]
        _divide_rows(mlp.gate_up, part.replace("down", "up"), own)


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
