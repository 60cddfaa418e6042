"""LinearWeight: what a linear layer multiplies by, with the description that its products are chosen by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream_kernels.fp8 import BLOCK, MAX_SUMMED_ROWS, PER_ROW, Fp8Scheme
from slipstream_kernels.gemm import tuning
from slipstream_kernels.gemm.activation_quant import PLAIN, Activation, ActivationQuant, Fp8, Int8
from slipstream_kernels.gemm.choose import plain_rows_of, this_device
from slipstream_kernels.gemm.cpu.int4_packed import CPU_WORDS
from slipstream_kernels.gemm.cpu.scaled_mm import scales_with_nan
from slipstream_kernels.gemm.cuda.mixed_gemm_w4a8_choice import most_tokens
from slipstream_kernels.gemm.cuda.stream_plan import COUNTER_ROWS
from slipstream_kernels.gemm.cuda.stream_w4a8_choice import most_exact_tokens
from slipstream_kernels.gemm.product import FP8_ROWS, INT8_ROWS, PLAIN_ROWS, Product, WeightKind
from slipstream_kernels.gemm.repack_int4 import activation_sum_columns
from slipstream_kernels.integer import Int4Weight

EXPERT_COUNTERS = 2  # of experts' weights, which the products of moe/cuda/grouped_stream.py share
FORMATS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.int32: "w8a16"}


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """operand: the values, [out, in], of experts [num_experts, out, in], or 4-bit ones.

    scales, bias: as the products of the format take them.  counters: zeros, of ops.scaled_mm_counters; of repacked
    4-bit weights of stream_w4a16 and stream_w4a8; of experts of grouped_stream.
    quant: how the input is quantised.  order: int64 [1, in], the input features in the order in which they are stored;
    of experts a row each.  Then rows are put in that order first, and are quantised afterwards.
    """

    kind: WeightKind
    operand: Tensor | Int4Weight
    scales: Tensor | None = None
    bias: Tensor | None = None
    counters: Tensor | None = None
    quant: ActivationQuant[Activation] = PLAIN
    order: Tensor | None = None

    @property
    def input_quant(self) -> ActivationQuant[Activation]:
        """In which form ops.linear takes rows."""
        return self.quant if self.order is None else PLAIN

    @property
    def traits(self) -> tuple[object, ...]:
        """What decides the kernels of its products and of their inputs beside the number of rows, comparable."""
        return self.kind, self.bias is None, self.order is None, self.quant.traits

    @property
    def tensor(self) -> Tensor:
        assert isinstance(self.operand, Tensor)
        return self.operand

    @property
    def int4(self) -> Int4Weight:
        assert isinstance(self.operand, Int4Weight)
        return self.operand


def expert_counters(device: torch.device) -> Tensor:
    """Zeros that the products of one weight of experts count their tiles in; each leaves them zero.  On one stream."""
    return torch.zeros(EXPERT_COUNTERS, dtype=torch.int32, device=device)


def plain_weight(weight: Tensor, bias: Tensor | None = None, counters: Tensor | None = None) -> LinearWeight:
    """The LinearWeight of weights that are not quantised: [out, in], or [num_experts, out, in].

    counters: of experts; without them each product makes its own.
    """
    num_experts = weight.shape[0] if weight.dim() == 3 else 0
    out_features, in_features = weight.shape[-2:]
    kind = WeightKind("plain", out_features, in_features, weight.dtype, weight.device, num_experts=num_experts)
    return LinearWeight(kind, weight, bias=bias, counters=counters)


def onednn_weight(packed: Tensor, out_features: int, in_features: int, bias: Tensor | None = None) -> LinearWeight:
    """The LinearWeight of weights that a CPU's library has packed for itself."""
    return LinearWeight(WeightKind("onednn", out_features, in_features, packed.dtype, packed.device), packed, bias=bias)


def fp8_weight(
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    counters: Tensor | None = None,
    *,
    input_scale: Tensor | None = None,
    num_experts: int = 0,
) -> LinearWeight:
    """The LinearWeight of e4m3 values [out, in] with scales of rows or blocks (ops.scaled_mm); of all experts.

    input_scale: fp32 [], a fixed one of all rows; None: they are scaled as they come.
    """
    by_blocks = scales.dim() == 2
    if values.device.type == "cpu" and not num_experts:
        scales = scales_with_nan(values, scales)
    out_features, in_features = values.shape[0] // max(num_experts, 1), values.shape[1]
    name, group = ("fp8_block", BLOCK) if by_blocks else ("fp8", 0)
    kind = WeightKind(name, out_features, in_features, values.dtype, values.device, group, FP8_ROWS, num_experts)
    most = 0 if num_experts else plain_rows_of(kind, tuning.PLAIN_ROWS_OF_FP8)
    quant = Fp8(Fp8Scheme(BLOCK) if by_blocks else Fp8Scheme(scale=input_scale), most)
    return LinearWeight(kind, *_by_expert(values, scales, num_experts), bias, counters, quant)


def int8_weight(
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    counters: Tensor | None = None,
    *,
    int8_rows: bool = False,
    input_scale: Tensor | None = None,
    num_experts: int = 0,
) -> LinearWeight:
    """The LinearWeight of int8 values [out, in], or of ops.repack_int8, with scales of rows (ops.int8_mm).

    int8_rows: the input is quantised too; input_scale as in fp8_weight.
    """
    out_features, in_features = values.shape[0] // max(num_experts, 1), values.shape[1] * values.itemsize
    rows = INT8_ROWS if int8_rows else PLAIN_ROWS
    kind = WeightKind(
        FORMATS[values.dtype], out_features, in_features, values.dtype, values.device, 0, rows, num_experts
    )
    most = 0 if num_experts or not int8_rows else plain_rows_of(kind, tuning.PLAIN_ROWS_OF_INT8)
    quant: ActivationQuant[Activation] = Int8(input_scale, most) if int8_rows else PLAIN
    return LinearWeight(kind, *_by_expert(values, scales, num_experts), bias, counters, quant)


def int4_linear_weight(
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    fp8_rows: bool = False,
    order: Tensor | None = None,
    num_experts: int = 0,
) -> LinearWeight:
    """A weight of 4 bits, canonical or repacked; experts one below the other.  fp8_rows: the input is quantised."""
    kind = WeightKind(
        format_of(weight, num_experts),
        weight.out_features // max(num_experts, 1),
        weight.in_features,
        weight.packed.dtype,
        weight.packed.device,
        weight.group_size,
        FP8_ROWS if fp8_rows else PLAIN_ROWS,
        num_experts,
    )
    quant: ActivationQuant[Activation] = (
        Fp8(PER_ROW if num_experts else _int4_scheme(weight, kind)) if fp8_rows else PLAIN
    )
    counters = None
    if kind.format in ("w4a16", "w4a8"):
        counters = torch.zeros(kind.out_features // COUNTER_ROWS, dtype=torch.int32, device=kind.device)
    return LinearWeight(kind, weight, bias=bias, counters=counters, quant=quant, order=order)


def _int4_scheme(weight: Int4Weight, kind: WeightKind) -> Fp8Scheme:
    """With sums of as many rows as the kernels multiply that take them, by the table of the weight's device."""
    sum_columns = activation_sum_columns(weight)
    if not sum_columns:
        return PER_ROW
    table = tuning.tuning_of(this_device(kind.device).name)
    summed_rows = most_exact_tokens(kind.out_features, table)
    most = Product(kind, MAX_SUMMED_ROWS, FP8_ROWS, torch.bfloat16, False)
    if not any(use.kernel == "stream_w4a8" and use.covers(most) for use in table.uses.get(("w4a8", FP8_ROWS), ())):
        summed_rows = max(summed_rows, most_tokens((kind.out_features, kind.in_features), table))
    return Fp8Scheme(sum_columns=sum_columns, summed_rows=summed_rows)


def deterministic_weight(
    values: Tensor, scales: Tensor | None = None, bias: Tensor | None = None, *, num_experts: int = 0
) -> LinearWeight:
    """The LinearWeight for products in which no row depends on the others (ops.invariant_mm, invariant_grouped_mm).

    values: [out, in], of experts one below the other.
    """
    name, (rows, in_features) = FORMATS.get(values.dtype, "plain"), values.shape
    kind = WeightKind(
        name, rows // max(num_experts, 1), in_features, values.dtype, values.device, num_experts=num_experts,
        deterministic=True,
    )  # fmt: skip
    if scales is not None:
        values, scales = _by_expert(values, scales, num_experts)
    elif num_experts:
        values = values.unflatten(0, (num_experts, -1))
    return LinearWeight(kind, values, scales, bias)


def format_of(weight: Int4Weight, num_experts: int = 0) -> str:
    """The name of a 4-bit weight's order in memory, by which kernels are chosen; of experts, if there are any."""
    if not weight.is_repacked:
        return "mxfp4" if weight.is_e2m1 else "int4"
    if weight.is_e2m1:
        return "grouped_mxfp4"
    if weight.packed.dtype == CPU_WORDS:
        return "int4_cpu"
    if weight.is_grouped_w4a8:
        return "grouped_w4a8"
    if num_experts:
        return "grouped_w4a16"
    return "w4a8" if weight.is_for_fp8_rows else "w4a16"


def _by_expert(values: Tensor, scales: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    if not num_experts:
        return values, scales
    return values.unflatten(0, (num_experts, -1)), scales.unflatten(0, (num_experts, -1))
