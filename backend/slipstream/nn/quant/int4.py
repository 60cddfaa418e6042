"""4-bit weights scaled by groups of input features; activations in 16 bits (wint4) or FP8 per token (w4a8_fp8).

From unquantised checkpoints the weights are quantised on the device, one part at a time as it is loaded; AWQ, GPTQ and
compressed-tensors ones are read as they are, whichever of the two methods multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slipstream_kernels import ops
from torch import Tensor

from slipstream.core.config import GROUP_SIZES
from slipstream.core.errors import ConfigError
from slipstream.nn.layer_spec import LinearSpec
from slipstream.nn.quant.int4_packing import CODES_PER_WORD, PACKINGS
from slipstream.nn.quant.method import (
    SHAPE,
    CheckpointTensors,
    QuantMethod,
    Weights,
    plain_tensors,
    register,
    require_stored_shape,
)
from slipstream.nn.stored_format import StoredFormat

DEFAULT_GROUP_SIZE = 128
GROUP_OF_COLUMN, ORDER, OWN_COLUMNS = "group_of_column", "order", "own_columns"


@dataclass(frozen=True)
class Int4(QuantMethod):
    """stored: the layout of a 4-bit checkpoint; None: the checkpoint is not quantised. group_size 0: one group a row.

    weights: "packed", "scales" and "zeros" if stored as ops.Int4Weight has them, "bias" if any. Act-order
    checkpoints have "order" too: the input features, sorted by group, as they stand in "packed"; a row per expert.
    """

    fp8_inputs: bool = False
    stored: StoredFormat | None = None
    group_size: int = DEFAULT_GROUP_SIZE

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return ops.fp8_refusal(device, dtype) if self.fp8_inputs else None

    def create_weights(self, spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> Weights:
        self._require_whole_groups(spec)
        rows, columns = spec.out_features, self._stored_columns(spec)
        groups = (rows, columns // (self.group_size or columns))
        weights = {
            "packed": torch.empty(rows, columns // 2, dtype=torch.uint8, device=device),
            "scales": torch.empty(groups, device=device),
        }
        if self.stored is not None and self.stored.has_zeros:
            weights["zeros"] = torch.empty(groups, dtype=torch.uint8, device=device)
        if self._has_order:
            orders = max(spec.num_experts, 1)  # int64, as the order that comes of them: the memory plan counts these
            weights[GROUP_OF_COLUMN] = torch.full((orders, columns), -1, dtype=torch.int64, device=device)
            if columns != spec.in_features and spec.columns is not None:
                first = spec.columns[0]
                weights[OWN_COLUMNS] = torch.tensor([first, first + spec.in_features])
        if spec.bias:
            weights["bias"] = torch.empty(rows, dtype=dtype, device=device)
        return weights

    def checkpoint_tensors(self, spec: LinearSpec, rows: int) -> CheckpointTensors:
        tensors = plain_tensors(spec, rows)
        if self.stored is not None:
            del tensors["weight"]
            columns = self._stored_columns(spec)
            num_groups = columns // (self.group_size or columns)
            tensors |= PACKINGS[self.stored.packing].tensors(self.stored, rows, columns, num_groups)
        return tensors

    def load(self, weights: Weights, suffix: str, rows: slice, tensor: Tensor) -> None:
        if suffix == SHAPE:
            require_stored_shape(tensor, rows, 2 * weights["packed"].shape[1])
            return
        tensor = tensor.to(weights["packed"].device)
        if suffix == "bias":
            weights["bias"][rows].copy_(tensor)
        elif self.stored is None:
            for name, value in ops.quantize_int4(tensor, self.group_size).tensors().items():
                weights[name][rows].copy_(value)
        else:
            decoders = PACKINGS[self.stored.packing].decoders(self.stored)
            name, decode = decoders[suffix]
            self._put(weights, name, rows, decode(tensor))

    def written_out_bytes(self, spec: LinearSpec, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
        group_size, sizes = self.group_size or spec.in_features, (spec.num_experts, spec.out_features, spec.in_features)
        if not spec.num_experts:
            weight = ops.DenseWeight("int4", *sizes[1:], group_size)
            return 0 if self.fp8_inputs else ops.dense_written_out_bytes(weight, num_rows, device, dtype)
        experts = ops.Int4Experts(*sizes, group_size, "int4", self.fp8_inputs)
        return ops.experts_written_out_bytes(experts, num_rows, device, dtype)

    def split_sums_bytes(self, num_sms: int) -> int:
        return ops.w4a8_sums_bytes(num_sms) if self.fp8_inputs else ops.w4a16_sums_bytes(num_sms)

    def finish(self, weights: Weights, num_experts: int = 0, dtype: torch.dtype | None = None) -> ops.LinearWeight:
        self._sort_columns(weights)
        packed, zeros = weights["packed"], weights.pop("zeros", None)  # some layouts have none beside the codes
        weight = ops.int4_weight(packed, weights["scales"], zeros, self.group_size, 2 * packed.shape[1])
        if num_experts:
            weight = ops.repack_expert_int4(weight, num_experts, fp8_rows=self.fp8_inputs)
        else:
            weight = ops.repack_int4(weight, for_fp8_rows=self.fp8_inputs, dtype=dtype)
        weights.update(weight.tensors())
        return ops.int4_linear_weight(
            weight,
            weights.get("bias"),
            fp8_rows=self.fp8_inputs,
            order=weights.get(ORDER),
            num_experts=num_experts,
        )

    @property
    def _has_order(self) -> bool:
        """With one group a row, the order of input features says nothing."""
        return self.stored is not None and self.stored.act_order and self.group_size > 0

    def _stored_columns(self, spec: LinearSpec) -> int:
        """Input features that are read: all, where a rank's are chosen once they are in order of their groups."""
        return spec.columns[1] if self._has_order and spec.columns is not None else spec.in_features

    def _put(self, weights: Weights, name: str, rows: slice, value: Tensor) -> None:
        if name == GROUP_OF_COLUMN:
            self._put_groups(weights, rows, value.long())
        elif name in weights:  # symmetric checkpoints store zero-points too, which say nothing
            weights[name][rows].copy_(value)

    def _put_groups(self, weights: Weights, rows: slice, found: Tensor) -> None:
        """Raises ValueError unless the groups of a part's input features are served beside those of its neighbours."""
        size = self.group_size or found.numel()
        in_turn = torch.arange(found.numel(), device=found.device) // size
        if not torch.equal(found.sort().values, in_turn):
            raise ValueError(f"does not put {size} input features into each group")
        if not self._has_order:
            if not torch.equal(found, in_turn):
                raise ValueError("is not in order, config.json says it is (desc_act: false)")
            return
        orders = weights[GROUP_OF_COLUMN]
        known = orders[rows.start * orders.shape[0] // weights["packed"].shape[0]]
        if known[0] >= 0 and not torch.equal(known, found):
            raise ValueError("differs from that of a part which is multiplied together with it")
        known.copy_(found)

    def _sort_columns(self, weights: Weights) -> None:
        """Put the input features of each order's rows group by group, and keep where they were."""
        group_of_column, own = weights.pop(GROUP_OF_COLUMN, None), weights.pop(OWN_COLUMNS, None)
        if group_of_column is None or (own is None and not (group_of_column.diff() < 0).any()):
            return
        order = torch.argsort(group_of_column, dim=1, stable=True)
        rows = weights["packed"].unflatten(0, (order.shape[0], -1))
        sorted_rows = [ops.pack_int4(ops.unpack_int4(part)[:, columns]) for part, columns in zip(rows, order)]
        weights["packed"] = torch.cat(sorted_rows)
        weights[ORDER] = order
        if own is not None:
            self._keep_own_columns(weights, *own.tolist())

    def _keep_own_columns(self, weights: Weights, start: int, stop: int) -> None:
        """A rank's groups of a sorted layer. Its order names features of the whole input, which it reads from."""
        if start % self.group_size or stop % self.group_size:
            reason = f"input features {start} to {stop} do not begin and end with a group of {self.group_size}"
            raise ConfigError("tensor_parallel_size", f"{start}:{stop}", reason)
        groups = slice(start // self.group_size, stop // self.group_size)
        weights["packed"] = weights["packed"][:, start // 2 : stop // 2].contiguous()
        for name in ("scales", "zeros"):
            if name in weights:
                weights[name] = weights[name][:, groups].contiguous()
        weights[ORDER] = weights[ORDER][:, start:stop]

    def _require_whole_groups(self, spec: LinearSpec) -> None:
        if (self.group_size and spec.in_features % self.group_size) or spec.in_features % CODES_PER_WORD:
            unit = self.group_size or CODES_PER_WORD
            reason = f"{spec.title} has {spec.in_features} inputs, not a multiple of {unit}{_fitting(spec.in_features)}"
            raise ConfigError("quantization_group_size", self.group_size, reason)
        for name, rows in spec.parts:
            if self.stored is not None and rows % CODES_PER_WORD:
                reason = f"{name} has {rows} outputs, not a multiple of {CODES_PER_WORD}, as words of weights hold"
                raise ConfigError("quantization", self.stored.packing, reason)


def _fitting(in_features: int) -> str:
    """The group sizes that divide the inputs, for a message."""
    sizes = [size for size in GROUP_SIZES if size > 0 and in_features % size == 0]
    return f"; accepted here: {', '.join(map(str, sizes))}" if sizes and in_features % CODES_PER_WORD == 0 else ""


register("wint4", Int4(), free_tokens=48, reads=lambda stored: Int4(False, stored, stored.group_size))
register("w4a8_fp8", Int4(True), free_tokens=97, reads=lambda stored: Int4(True, stored, stored.group_size))
