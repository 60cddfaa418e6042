"""All layers of a decode step in one kernel: its device code against the reference, on a CPU and on a GPU."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import emulation
import pytest
import torch
from layers_emulator import Sizes, draw_rows, draw_stack, emulate
from slipstream_kernels import ops
from slipstream_kernels.cuda import build
from slipstream_kernels.fused_decode.cuda import decode_layers as cuda_layers
from slipstream_kernels.fused_decode.cuda.decode_layers import Launch
from slipstream_kernels.fused_decode.reference.decode_layers import decode_layers as reference
from slipstream_kernels.kv_cache import FP8_DTYPE
from slipstream_kernels.layer_stack import LayerStack

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
CPU = torch.device("cpu")
TOLERANCE = 1.2e-2  # of bf16 roundings that fall otherwise, layer after layer; a wrong element shows as 0.1 and more
UNEVEN = [100, 0, 64, 17, 5, 33, 129, 80]
SMALL = Sizes()


def copied(stack: LayerStack) -> LayerStack:
    """With caches of its own."""

    def copy(layer):
        cache = layer.cache
        return replace(layer, cache=replace(cache, key=cache.key.clone(), value=cache.value.clone()))

    return replace(stack, layers=tuple(copy(layer) for layer in stack.layers))


def error_of(y: torch.Tensor, expected: torch.Tensor, seq_lens: list[int]) -> float:
    live = [row for row, length in enumerate(seq_lens) if length]
    return float((y[live].double() - expected[live].double()).norm() / expected[live].double().norm())


def require_same_caches(stack: LayerStack, expected: LayerStack, before: LayerStack) -> None:
    """All but the new tokens' rows are as before; those differ by a rounding at most."""
    for layer, right, old in zip(stack.layers, expected.layers, before.layers):
        for name in ("key", "value"):
            mine, theirs, was = (getattr(each.cache, name).float() for each in (layer, right, old))
            written = (theirs != was).any(-1)
            assert torch.equal(mine[~written], was[~written])
            wrong = (mine - theirs).abs() > 0.13 * theirs.abs() + 0.02
            assert wrong.float().mean() < 1e-3


@pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))
def test_device_code_equals_the_reference() -> None:
    """Emulated with memory that arrives late: CTAs of unlike shares, units of keys that several share, padding.

    One format of weights and keys; the others are compared on a GPU.
    """
    torch.manual_seed(7)
    kind, kv = "fp8", FP8_DTYPE
    cases = ((UNEVEN, Launch(6, slots_under_way=2)),)
    for seed, (seq_lens, launch) in enumerate(cases):
        before, rows = draw_stack(SMALL, kind, kv, CPU), draw_rows(SMALL, seq_lens, CPU)
        hidden = torch.randn(len(seq_lens), SMALL.hidden).bfloat16()
        stack, expected_stack = copied(before), copied(before)
        expected = reference(hidden, expected_stack, rows)
        y = emulate(hidden, stack, rows, launch, seed)
        assert error_of(y, expected, seq_lens) < TOLERANCE
        require_same_caches(stack, expected_stack, before)
        kept = cuda_layers.prepared(stack, launch.num_ctas)
        assert kept.counters.eq(0).all() and kept.arrivals.eq(0).all()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_every_row_and_key_is_taken_once(tmp_path: Path) -> None:
    include = build.DEVICE_CODE
    program = tmp_path / "walk"
    source = Path(__file__).parent / "layers_walk_check.cc"
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", f"-I{include}", str(source), "-o", str(program)], check=True)
    shapes = ((4096, 6144, 4096, 14336), (4096, 4608, 3584, 18944), (2048, 3072, 2048, 8192), (512, 1024, 512, 768))
    lengths = ([1], [1000], [1024] * 2, [5000] * 8, [1, 0, 1000, 5000, 64, 65, 0, 131072], [63, 64, 65, 31])
    for shape in shapes:
        for num_ctas in (132, 114, 7):
            for each in lengths:
                command = [str(program), *(str(number) for number in (*shape, num_ctas, *each))]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                assert done.stdout == "walked\n", (command, done.stdout[:500])


def test_reference_of_a_row_does_not_depend_on_others() -> None:
    torch.manual_seed(3)
    stack, rows = draw_stack(SMALL, "fp8", torch.bfloat16, CPU), draw_rows(SMALL, [40, 9], CPU)
    hidden = torch.randn(2, SMALL.hidden).bfloat16()
    whole = ops.decode_layers(hidden, copied(stack), rows, backend="reference")
    alone = replace(
        rows, **{name: getattr(rows, name)[1:] for name in ("positions", "slot_mapping", "seq_lens", "block_tables")}
    )
    y = ops.decode_layers(hidden[1:], copied(stack), alone, backend="reference")
    assert error_of(y, whole[1:], [9]) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 640}, "not a multiple of 256"),
        ({"hidden": 8192}, "more than 4096"),
        ({"kv_heads": 2, "q_heads": 18}, "groups of 9"),
        ({"block_size": 8}, "power of two >= 16"),
        ({"layers": 41}, "more than 40"),
    ],
)
def test_what_the_kernel_cannot_serve_is_said(change: dict[str, int], message: str) -> None:
    sizes = replace(Sizes(hidden=512, intermediate=256, layers=1, num_blocks=1), **change)
    meta = torch.device("meta") if change.get("hidden") == 8192 else CPU
    stack = draw_stack(replace(sizes, layers=1), "fp8" if meta == CPU else "bf16", torch.bfloat16, meta)
    stack = replace(stack, layers=stack.layers * sizes.layers)
    reason = cuda_layers.shape_refusal(stack, 132)
    assert reason is not None and message in reason


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_activations_of_another_type_are_refused(kind: str) -> None:
    """Neither those weights nor an FP8 cache say which the model computes in."""
    stack, rows = draw_stack(SMALL, kind, FP8_DTYPE, CPU), draw_rows(SMALL, [4], CPU)
    assert cuda_layers.shape_refusal(stack, 132) is None
    layers = [replace(layer, post_attention_norm=layer.post_attention_norm.half()) for layer in stack.layers]
    reason = cuda_layers.shape_refusal(replace(stack, layers=tuple(layers)), 132)
    assert reason == "activations of torch.float16 are not bfloat16"
    with pytest.raises(ValueError, match=r"hidden: dtype torch\.float16, expected that of the norms"):
        ops.decode_layers(torch.zeros(1, SMALL.hidden).half(), stack, rows)


def test_shapes_that_do_not_fit_together_are_refused() -> None:
    stack, rows = draw_stack(SMALL, "bf16", torch.bfloat16, CPU), draw_rows(SMALL, [4], CPU)
    layer = stack.layers[0]
    wrong = replace(stack, layers=(replace(layer, o=layer.down),))
    with pytest.raises(ValueError, match=r"stack.layers\[0\].o: shape"):
        ops.decode_layers(torch.zeros(1, SMALL.hidden).bfloat16(), wrong, rows)
    with pytest.raises(ValueError, match="cannot run decode_layers: the layers are on cpu"):
        ops.decode_layers(torch.zeros(1, SMALL.hidden).bfloat16(), stack, rows, backend="cuda")


@needs_hopper
@pytest.mark.parametrize("kv", [FP8_DTYPE, torch.bfloat16], ids=["fp8kv", "bf16kv"])
@pytest.mark.parametrize("kind", ["fp8", "int4", "bf16"])
def test_cuda_equals_the_reference(kind: str, kv: torch.dtype) -> None:
    device = torch.device("cuda")
    sizes = Sizes(hidden=4096, q_heads=32, kv_heads=8, intermediate=14336, layers=2, block_size=64, num_blocks=700)
    for seq_lens in ([1], [1000], [1024, 5000], [5000, 1, 1000, 1024], [1, 1000, 0, 1024, 5000, 64, 65, 63]):
        before, rows = draw_stack(sizes, kind, kv, device), draw_rows(sizes, seq_lens, device)
        hidden = torch.randn(len(seq_lens), sizes.hidden, device=device).bfloat16()
        stack, expected_stack = copied(before), copied(before)
        expected = reference(hidden, expected_stack, rows)
        y = ops.decode_layers(hidden, stack, rows, backend="cuda")
        assert error_of(y, expected, seq_lens) < TOLERANCE
        require_same_caches(stack, expected_stack, before)
        again = copied(before)
        assert torch.equal(ops.decode_layers(hidden, again, rows, backend="cuda")[0], y[0])
