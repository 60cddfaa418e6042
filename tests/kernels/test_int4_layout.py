"""4-bit weights in the GPU's order: nothing is lost; an emulator of the kernels' instructions equals the reference."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import int4_emulator
import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.cuda import device as this_gpu
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.gemm import int4_layout
from slipstream_kernels.gemm.int4_checks import warn_of_canonical
from slipstream_kernels.integer import Int4Weight


def weight_of(out_features: int, in_features: int, group_size: int, has_zeros: bool, scale_dtype=torch.bfloat16):
    groups = (out_features, in_features // group_size)
    packed = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8)
    scales = ((0.02 + torch.rand(groups)) * in_features**-0.5 / 4).to(scale_dtype).float()
    zeros = torch.randint(17, groups, dtype=torch.uint8) if has_zeros else None
    return Int4Weight(packed, scales, zeros, group_size, out_features, in_features)


@pytest.mark.parametrize("sizes", [(16, 128), (48, 384), (128, 1024)])
def test_codes_are_kept(sizes) -> None:
    packed = torch.randint(256, (sizes[0], sizes[1] // 2), dtype=torch.uint8)
    blocks = int4_layout.pack_qweight(packed)
    assert blocks.shape == (sizes[0] // 16, sizes[1] // 128, 256) and blocks.nbytes == packed.nbytes
    assert torch.equal(int4_layout.unpack_qweight(blocks), packed)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [64, 128, 384])
def test_scales_of_checkpoints_are_kept(group_size, has_zeros, scale_dtype) -> None:
    weight = weight_of(64, 384, group_size, has_zeros, scale_dtype)
    kept = int4_layout.canonical(int4_layout.repack(weight))
    assert torch.equal(kept.packed, weight.packed) and torch.equal(kept.scales, weight.scales)
    assert torch.equal(kept.zeros, torch.full_like(kept.zeros, 8) if weight.zeros is None else weight.zeros)


def test_both_orders_of_words_hold_the_same() -> None:
    by_block, by_tile = int4_layout.repack(weight_of(48, 384, 64, True)).scales
    tiles = by_tile.reshape(3, 3, 16, 2)
    for tile in range(3):
        assert torch.equal(tiles[tile], by_block[:, 16 * tile : 16 * tile + 16])


def test_a_row_of_zero_scales_stays_zero() -> None:
    weight = weight_of(64, 256, 128, False)
    weight.scales[3] = 0
    kept = int4_layout.canonical(int4_layout.repack(weight))
    assert (kept.scales[3] == 0).all() and kept.scales.isfinite().all()


def test_codecs_are_exact_for_every_code_and_zero() -> None:
    codes, zeros = torch.meshgrid(torch.arange(16), torch.arange(17), indexing="ij")
    word = sum(((codes + i) % 16) << (4 * i) for i in range(8))
    exact = torch.stack([(codes + i) % 16 - zeros for i in range(8)], dim=-1).float()
    assert torch.equal(int4_emulator.expand_fp16(word, zeros), exact)
    assert torch.equal(int4_emulator.expand_bf16(word, zeros), exact)


def test_tables_round_each_weight_once() -> None:
    codes, zeros = torch.meshgrid(torch.arange(16), torch.arange(17), indexing="ij")
    scale = torch.tensor(11.3125).half()  # the largest after its channel scale is 16
    halves = [half.half().view(torch.int16).long() & 0xFFFF for half in (512 * scale.float(), zeros.float() / -512)]
    group = halves[0] | (halves[1] << 16)
    word = sum(((codes + i) % 16) << (4 * i) for i in range(8))
    exact = torch.stack([((codes + i) % 16 - zeros) * scale.float() for i in range(8)], dim=-1)
    found = int4_emulator.look_up(word, int4_emulator.table_words(group))
    assert torch.equal(found, exact.to(E4M3).float()) and found.isfinite().all()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [64, 128, 512])
def test_the_emulated_kernels_are_the_reference(group_size, has_zeros, kind) -> None:
    weight = weight_of(192, 512, group_size, has_zeros)
    x = torch.randn(5, 512).to(torch.float16 if kind == "fp16" else torch.bfloat16)
    bias = torch.randn(192).to(x.dtype) if has_zeros else None
    expected = ops.int4_mm(x, weight, bias, backend="reference").float()
    repacked = int4_layout.repack(weight)
    # Codes, zeros and scales are exact: what differs is the order of fp32 sums, and one rounding of the result.
    y = int4_emulator.rows(x, repacked, bias).float()
    assert ((y - expected).abs() <= 2**-7 * expected.abs() + 1e-5).all()
    # Here 16-bit operands are rounded once after they are scaled.
    y = int4_emulator.mixed(x, repacked, bias).float()
    assert (y - expected).norm() / expected.norm() < (4e-3 if kind == "bf16" else 2.5e-3)


def test_what_has_no_order_is_named() -> None:
    for sizes, named in [
        ((72, 128, 128), "out_features"),
        ((64, 192, 64), "in_features"),
        ((64, 256, 32), "group_size"),
    ]:
        assert named in str(int4_layout.refusal(*sizes))
    assert int4_layout.refusal(64, 256, 256) is None
    weight = replace(weight_of(64, 256, 128, False), packed=torch.zeros(64, 128, dtype=torch.int32))
    assert weight.is_repacked


@pytest.mark.parametrize(
    ("sizes", "num_experts", "named", "reason"),
    [
        ((64, 256, 32), 0, "64 x 256", "group_size: 32 is not 64, 128 or in_features"),
        ((64, 10944, 64), 0, "64 x 10944", "in_features: 10944 is not a multiple of 128"),
        ((192, 256, 32), 3, "3 experts, 64 x 256 each,", "group_size: 32 is not 64, 128 or in_features"),
    ],
)
def test_weights_that_stay_canonical_are_named_once(
    sizes: tuple[int, int, int],
    num_experts: int,
    named: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All layers of a size have one line in the log, a warning with the reason."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    weight = weight_of(*sizes, False)
    on_gpu: Any = SimpleNamespace(
        dtype=torch.uint8, shape=weight.packed.shape, device=torch.device("cuda", 31), is_cuda=True
    )
    held = replace(weight, packed=on_gpu)
    warn_of_canonical.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                found = ops.repack_expert_int4(held, num_experts) if num_experts else ops.repack_int4(held)
                assert found is held
    finally:
        this_gpu.is_hopper.cache_clear()
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == f"4-bit weights of {named} stay in canonical order, whose products are slower: {reason}"
