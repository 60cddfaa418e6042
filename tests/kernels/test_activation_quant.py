"""Gated activations in every form that a layer reads: fused as apart, and gated in the product only by silu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.gemm import choose, linear
from slipstream_kernels.gemm.activation_quant import PLAIN, Activation, ActivationQuant, Fp8, Int8
from slipstream_kernels.gemm.kernels import KERNELS
from slipstream_kernels.kernel_choice import always
from slipstream_kernels.ops import Fp8Scheme

FORMS: dict[str, ActivationQuant[Activation]] = {
    "plain": PLAIN,
    "fp8 by token": Fp8(Fp8Scheme()),
    "fp8 by group": Fp8(Fp8Scheme(group_size=128)),
    "fp8 with sums": Fp8(Fp8Scheme(sum_columns=128)),
    "fp8, few rows plain": Fp8(Fp8Scheme(), max_plain_rows=7),
    "int8": Int8(),
    "int8, few rows plain": Int8(max_plain_rows=7),
}
GATED = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul}


def parts(rows: Activation) -> list[torch.Tensor]:
    if isinstance(rows, torch.Tensor):
        return [rows]
    count = rows.num_tokens
    sums = [] if getattr(rows, "activation_sums", None) is None else [rows.activation_sums[0, :, :count]]
    return [rows.values[:count].float(), rows.scales[:count], *sums]


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_that_of_the_activated_rows(device, form, activation) -> None:
    quant = FORMS[form]
    for num_tokens in (7, 8):
        x = 2 * torch.randn(num_tokens, 2 * 384, device=device).bfloat16()
        fused, apart = quant.gated_mul(x, activation), quant.cast(GATED[activation](x))
        assert type(fused) is type(apart)
        for ours, theirs in zip(parts(fused), parts(apart), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("activation", GATED)
def test_only_silu_is_left_to_a_product_that_gates(activation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that says it gates returns its columns as they are here, so that what asked for it shows."""
    asked = []

    def record(product, device=None):
        asked.append(product.gated)
        return choose.variant_of.__wrapped__(product)

    for name, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, replace(kernel, gates=always))
    monkeypatch.setattr(linear, "variant_of", record)
    weight = ops.plain_weight(torch.randn(64, 48), None)
    x = torch.randn(5, 48)
    y = ops.gated_linear(x, weight, PLAIN, activation)
    assert asked == [activation == "silu"]
    if activation == "gelu_tanh":
        assert torch.equal(y, ops.gelu_mul(ops.linear(x, weight)))
