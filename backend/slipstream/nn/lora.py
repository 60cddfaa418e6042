"""LoRA: low-rank products beside those of linear layers, of the adapter that each row of a step has.

y += (x Aᵀ) Bᵀ. A layer holds the A and B of all adapters on the device, in slots of one rank. The rows of a step are
gathered by adapter into tiles whose number depends on the number of rows alone, so a captured step stays valid for
every mix of adapters; rows without one are in no tile. Source: arXiv:2106.09685; many adapters in one batch:
arXiv:2311.03285.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from slipstream_kernels import ops
from slipstream_kernels.ops import PLAIN, ActivationQuant
from torch import Tensor

from slipstream.nn.layer_context import LayerContext
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.linear import A, Linear
from slipstream.nn.stored_names import Names, stored_slots, tensor_name
from slipstream.nn.weight_slot import WeightSlot

if TYPE_CHECKING:
    from slipstream.nn.decoder import Decoder


@dataclass
class LoraRows:
    """The slots of a model, shared by its layers, and which rows of the running step have the adapter of which.

    tiles: None while no row has an adapter: layers then do what they do without adapters.
    """

    num_slots: int
    rank: int
    tiles: ops.AdapterTiles | None = field(default=None, compare=False)


class LoraLinear(Linear):
    """A linear layer that adds the products of adapters. In a step with some it reads plain rows, and quantises them
    for its own product.

    a: [parts, slots, rank, in_features]; b: [slots, rank, out_features], in the type of activations. The rest of a
    slot whose adapter has a lower rank is zero. With tensor parallel a "column" shard holds all of A and its rows of B;
    a "row" shard its features of A and all of B, and its result is summed over the ranks together with the product's.
    """

    def __init__(self, spec: LinearSpec, context: LayerContext) -> None:
        super().__init__(spec, context)
        assert context.lora is not None
        self._rows, self._beside = context.lora, context.beside
        self._sizes = [rows for _, rows in self.spec.parts]
        slots = self._rows.num_slots, self._rows.rank
        shapes = (len(self._sizes), *slots, self.spec.in_features), (*slots, sum(self._sizes))
        self.a, self.b = (torch.zeros(shape, dtype=context.dtype, device=context.device) for shape in shapes)
        self._columns = [slice(end - rows, end) for end, rows in zip(accumulate(self._sizes), self._sizes)]
        first, _ = self.spec.columns or (0, 0)
        self._own_features = slice(first, first + self.spec.in_features)
        self._own_rows = [self._whole.rows_of(part, rows, context.parallel) for part, rows in self._whole.parts]

    @property
    def stored_spec(self) -> LinearSpec:
        """The spec of all ranks together, as adapters are stored."""
        return self._whole

    @property
    def activation_quant(self) -> ActivationQuant[ops.Activation]:
        return super().activation_quant if self._rows.tiles is None else PLAIN

    def apply(self, x: ops.Activation) -> Tensor:
        tiles = self._rows.tiles
        if tiles is None:
            return super().apply(x)
        assert isinstance(x, Tensor)
        with self._beside.fork(x):  # few programs, which fit beside those of the layer's own product
            inner = ops.lora_shrink(x, self.a, tiles)
        y = ops.linear(self.weight.input_quant.cast(x), self.weight)
        self._beside.join(x)
        return ops.lora_expand(y, inner, self.b, tiles, self._sizes)

    def apply_gated(self, x: ops.Activation, quant: ActivationQuant[A], activation: str = "silu") -> A:
        if self._rows.tiles is None:
            return super().apply_gated(x, quant, activation)
        return quant.gated_mul(self.apply(x), activation)

    def clear(self, slot: int) -> None:
        self.a[:, slot] = 0.0
        self.b[slot] = 0.0

    def put_a(self, slot: int, part: int, a: Tensor) -> None:
        """a: [r, in_features] of all ranks, r at most the slots' rank."""
        self.a[part, slot, : len(a)].copy_(a[:, self._own_features], non_blocking=True)

    def put_b(self, slot: int, part: int, b: Tensor) -> None:
        """b: [rows of the part of all ranks, r], with the adapter's scale in it."""
        self.b[slot, : b.shape[1], self._columns[part]].copy_(b[self._own_rows[part]].t(), non_blocking=True)


def make_linear(spec: LinearSpec, context: LayerContext) -> Linear:
    """A layer that adapters may change."""
    return Linear(spec, context) if context.lora is None else LoraLinear(spec, context)


@dataclass(frozen=True)
class LoraPair:
    """The matrices of one module: a [r, in_features], b [out_features, r] as the checkpoint orders its rows, scaled."""

    a: Tensor
    b: Tensor


class PackedPairs(Mapping[str, LoraPair]):
    """Pairs that other processes get: a view of one tensor each, so that all are sent as one run of bytes.

    The 448 tensors of rank 16 for an 8B model, 84 MB, take 160 ms to pickle one by one and 70 ms so.
    """

    def __init__(self, shapes: Mapping[str, tuple[torch.Size, torch.Size]], numbers: Tensor) -> None:
        self._shapes, self._numbers = dict(shapes), numbers
        counts = [shape.numel() for pair in self._shapes.values() for shape in pair]
        views = iter(numbers.split(counts))
        self._pairs = {
            module: LoraPair(next(views).view(shape_a), next(views).view(shape_b))
            for module, (shape_a, shape_b) in self._shapes.items()
        }

    @staticmethod
    def of(pairs: Mapping[str, LoraPair]) -> PackedPairs:
        shapes = {module: (pair.a.shape, pair.b.shape) for module, pair in pairs.items()}
        return PackedPairs(shapes, torch.cat([one.flatten() for pair in pairs.values() for one in (pair.a, pair.b)]))

    def pin_memory(self) -> PackedPairs:
        return PackedPairs(self._shapes, self._numbers.pin_memory())

    def __getitem__(self, module: str) -> LoraPair:
        return self._pairs[module]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __reduce__(self) -> tuple[object, ...]:
        data = pickle.PickleBuffer(self._numbers.view(torch.uint8).numpy().data)
        return _unpacked, (self._shapes, self._numbers.dtype, data)


def _unpacked(shapes: Mapping[str, tuple[torch.Size, torch.Size]], dtype: torch.dtype, data: bytearray) -> PackedPairs:
    return PackedPairs(shapes, torch.frombuffer(data, dtype=dtype))


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
    """What adapters may change in a decoder's own layers, by the names of the checkpoint; it may be on "meta"."""

    def __init__(self, decoder: Decoder, names: Names) -> None:
        self._slot = 0  # that is being loaded
        self.targets = dict(self._found(decoder, names))

    def load(self, slot: int, pairs: Mapping[str, LoraPair]) -> None:
        """Put an adapter in the place of another one; what it has for other stages' layers is left out. Its shapes have
        been checked."""
        self._slot = slot
        for linear in {id(linear): linear for target in self.targets.values() for linear, _ in target.parts}.values():
            linear.clear(slot)
        for name, pair in pairs.items():
            if (target := self.targets.get(name)) is None:
                continue
            for linear, part in target.parts:
                linear.put_a(slot, part, pair.a)
            target.load_b.load(pair.b)

    def _found(self, decoder: Decoder, names: Names) -> Iterator[tuple[str, LoraTarget]]:
        for index, layer in zip(decoder.own_indices, decoder.own_layers):
            parts: dict[str, list[tuple[LoraLinear, int]]] = {}
            own_names: dict[str, list[str]] = {}
            slots: list[tuple[str, str, WeightSlot]] = []
            for linear in layer.linears():
                if isinstance(linear, LoraLinear):
                    for part, (name, num_rows) in enumerate(linear.stored_spec.parts):
                        parts.setdefault(tensor_name(names, name, index), []).append((linear, part))
                        own_names.setdefault(tensor_name(names, name, index), []).append(name)
                        load = partial(self._put_b, linear, part)
                        slots.append((name, "weight", WeightSlot((num_rows, 1), load, rows_axis=0, num_rows=num_rows)))
            heads = layer.spec.attention.num_kv_heads
            for stored, slot in stored_slots(slots, names, index, heads).items():
                module = stored.removesuffix(".weight")
                own = tuple(parts[module])
                in_features = own[0][0].stored_spec.in_features
                yield module, LoraTarget(index, tuple(own_names[module]), in_features, slot.shape[0], own, slot)

    def _put_b(self, linear: LoraLinear, part: int, b: Tensor) -> None:
        linear.put_b(self._slot, part, b)
