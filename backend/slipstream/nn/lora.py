"""LoRA: low-rank products beside those of linear layers, of the adapter that each row of a step has.

y += (x Aᵀ) Bᵀ. A layer holds the A and B of all adapters on the device, side by side in slots of one rank: two dense
products serve every mix of adapters, and between them the columns of other rows' slots are zeroed. So a captured step
stays valid for every mix, and rows without an adapter get exactly zero. Source: arXiv:2106.09685; many adapters in one
batch: arXiv:2311.03285.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from slipstream_kernels import ops
from slipstream_kernels.gemm.activation_quant import PLAIN, A, ActivationQuant
from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.linear import Linear
from slipstream.nn.stored_names import Names, stored_slots, tensor_name
from slipstream.nn.weight_slot import WeightSlot

if TYPE_CHECKING:
    from slipstream.nn.decoder import Decoder

NO_SLOT = -1


@dataclass
class LoraRows:
    """The slots of a model, shared by its layers, and which of them the rows of the running step do not have.

    off: [T, num_slots] bool, None while no row has an adapter: layers then do what they do without adapters.
    """

    num_slots: int
    rank: int
    off: Tensor | None = field(default=None, compare=False)

    def begin(self, slots: Tensor) -> None:
        """slots: [T] int64, NO_SLOT for rows without an adapter."""
        self.off = slots[:, None] != torch.arange(self.num_slots, device=slots.device)

    def end(self) -> None:
        self.off = None


class LoraLinear(Linear):
    """A linear layer that adds the products of adapters. It reads plain rows, and quantises them for its own product.

    a: [parts, slots * rank, in_features]; b: [slots * rank, out_features], in the type of activations. The rest of a
    slot whose adapter has a lower rank is zero.
    """

    def __init__(self, spec: LinearSpec, context: LayerContext) -> None:
        super().__init__(spec, context)
        assert context.lora is not None
        self._rows = context.lora
        width, parts = self._rows.num_slots * self._rows.rank, self.spec.parts
        shapes = (len(parts), width, self.spec.in_features), (width, sum(rows for _, rows in parts))
        self.a, self.b = (torch.zeros(shape, dtype=context.dtype, device=context.device) for shape in shapes)
        ends = [sum(rows for _, rows in parts[: index + 1]) for index in range(len(parts))]
        self._columns = [slice(end - rows, end) for end, (_, rows) in zip(ends, parts)]

    @property
    def activation_quant(self) -> ActivationQuant[ops.Activation]:
        return PLAIN

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(x)

    def apply(self, x: ops.Activation) -> Tensor:
        assert isinstance(x, Tensor)
        y = ops.linear(self.weight.input_quant.cast(x), self.weight)
        return y if self._rows.off is None else self._added(x, y, self._rows.off)

    def apply_gated(self, x: ops.Activation, quant: ActivationQuant[A]) -> A:
        assert isinstance(x, Tensor)
        if self._rows.off is None:
            return ops.gated_linear(self.weight.input_quant.cast(x), self.weight, quant)
        return quant.silu_mul(self.apply(x))

    def _added(self, x: Tensor, y: Tensor, off: Tensor) -> Tensor:
        num_tokens, num_slots = off.shape
        inner = torch.matmul(x, self.a.transpose(1, 2))  # [parts, T, slots * rank]
        # filled, not multiplied: another row's adapter may have overflowed there
        inner.view(-1, num_tokens, num_slots, self._rows.rank).masked_fill_(off[None, :, :, None], 0.0)
        for part, columns in zip(inner, self._columns):
            y[:, columns].addmm_(part, self.b[:, columns])
        return y

    def clear(self, slot: int) -> None:
        self.a[:, self._rank_rows(slot)] = 0.0
        self.b[self._rank_rows(slot)] = 0.0

    def put_a(self, slot: int, part: int, a: Tensor) -> None:
        """a: [r, in_features], r at most the slots' rank."""
        self.a[part, self._rank_rows(slot, len(a))].copy_(a, non_blocking=True)

    def put_b(self, slot: int, part: int, b: Tensor) -> None:
        """b: [rows of the part, r], with the adapter's scale in it."""
        self.b[self._rank_rows(slot, b.shape[1]), self._columns[part]].copy_(b.t(), non_blocking=True)

    def _rank_rows(self, slot: int, rank: int | None = None) -> slice:
        first = slot * self._rows.rank
        return slice(first, first + (self._rows.rank if rank is None else rank))


def make_linear(spec: LinearSpec, context: LayerContext) -> Linear:
    """A layer that adapters may change."""
    return Linear(spec, context) if context.lora is None else LoraLinear(spec, context)


@dataclass(frozen=True)
class LoraPair:
    """Of one module: a [r, in_features], b [out_features, r] as the checkpoint orders its rows, scaled."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class LoraTarget:
    """A module of the checkpoint that adapters may change. parts: the layers and parts that it is stored for; names:
    what the decoder calls those of its layer, such as q."""

    layer: int
    names: tuple[str, ...]
    in_features: int
    out_features: int
    parts: tuple[tuple[LoraLinear, int], ...]
    load_b: WeightSlot


class LoraTargets:
    """What adapters may change in a decoder, by the names of the checkpoint; the decoder may be on "meta"."""

    def __init__(self, decoder: Decoder, names: Names) -> None:
        self._slot = 0  # that is being loaded
        self.targets = dict(self._found(decoder, names))

    def load(self, slot: int, pairs: Mapping[str, LoraPair]) -> None:
        """Put an adapter in the place of another one. Its shapes have been checked."""
        self._slot = slot
        for linear in {id(linear): linear for target in self.targets.values() for linear, _ in target.parts}.values():
            linear.clear(slot)
        for name, pair in pairs.items():
            target = self.targets[name]
            for linear, part in target.parts:
                linear.put_a(slot, part, pair.a)
            target.load_b.load(pair.b)

    def _found(self, decoder: Decoder, names: Names) -> Iterator[tuple[str, LoraTarget]]:
        for index, layer in enumerate(decoder.layers):
            parts: dict[str, list[tuple[LoraLinear, int]]] = {}
            own_names: dict[str, list[str]] = {}
            slots: list[tuple[str, str, WeightSlot]] = []
            for linear in layer.linears():
                if isinstance(linear, LoraLinear):
                    for part, (name, num_rows) in enumerate(linear.spec.parts):
                        parts.setdefault(tensor_name(names, name, index), []).append((linear, part))
                        own_names.setdefault(tensor_name(names, name, index), []).append(name)
                        load = partial(self._put_b, linear, part)
                        slots.append((name, "weight", WeightSlot((num_rows, 1), load, rows_axis=0, num_rows=num_rows)))
            heads = layer.spec.attention.num_kv_heads
            for stored, slot in stored_slots(slots, names, index, heads).items():
                module = stored.removesuffix(".weight")
                own = tuple(parts[module])
                in_features = own[0][0].spec.in_features
                yield module, LoraTarget(index, tuple(own_names[module]), in_features, slot.shape[0], own, slot)

    def _put_b(self, linear: LoraLinear, part: int, b: Tensor) -> None:
        linear.put_b(self._slot, part, b)
