"""rope_write_kv: right against fp64, every cache type within its step, triton the same as the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from slipstream_kernels import ops
from slipstream_kernels.kv.reference.quantized_kv import dequantize_rows
from slipstream_kernels.kv_cache import QUANTIZED_DTYPES, KvCache, empty_kv_cache
from tolerances import ELEMENTWISE

BACKENDS = ["reference", "triton"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn
SLOTS = [3, -1, 47, 17, 0]
# num_q_heads, num_kv_heads, head_dim, rotary_dim
GEOMETRIES = [(6, 2, 64, 64), (3, 3, 80, 20), (5, 1, 24, 24), (4, 2, 96, 48), (18, 17, 256, 256)]


@dataclass(frozen=True)
class Step:
    """Arguments of rope_write_kv: q, k, v are views of one fused tensor, slot -1 is among the slots."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rope: ops.Rope | None
    cache: KvCache
    norms: ops.HeadNorms | None = None

    def run(self, backend: str) -> torch.Tensor:
        slots, qk_rope = ops.TokenSlots(self.positions, self.slots), ops.QKRope(self.rope, self.norms)
        return ops.rope_write_kv(self.q, self.k, self.v, slots, qk_rope, self.cache, backend=backend)


def make_step(geometry, dtype, kv_dtype, device, interleaved=False, seed=0) -> Step:
    torch.manual_seed(seed)
    num_q_heads, num_kv_heads, head_dim, rotary_dim = geometry
    fused = torch.randn(5, num_q_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    q, k, v = fused.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    angles = torch.outer(torch.arange(31.0), 10000 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    rope = ops.Rope(torch.cat((angles.cos(), angles.sin()), dim=-1).to(device), interleaved)
    head_scales = tuple((0.5 + torch.rand(num_kv_heads)).to(device) for _ in range(2))
    cache = empty_kv_cache((3, num_kv_heads, 16, head_dim), kv_dtype, device, head_scales)
    positions, slots = (torch.tensor(numbers, device=device) for numbers in ([0, 30, 7, 1, 2], SLOTS))
    return Step(q, k, v, positions, slots, rope, cache)


def turned(x: torch.Tensor, step: Step) -> torch.Tensor:
    """Rotated as complex numbers, fp64."""
    half, wide = step.rope.rotary_dim // 2, x.double()
    cos, sin = step.rope.cos_sin.double()[step.positions][:, None].chunk(2, dim=-1)
    rotated = wide[..., : 2 * half]
    split = (half, 2) if step.rope.interleaved else (2, half)
    pairs = rotated.unflatten(-1, split)
    pairs = pairs if step.rope.interleaved else pairs.transpose(-1, -2)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    product = product if step.rope.interleaved else product.transpose(-1, -2)
    return torch.cat([product.flatten(-2), wide[..., 2 * half :]], dim=-1)


def stored(step: Step, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, steps) of the tokens that have a slot, fp64: what a reader sees, and the unit of its rounding."""
    cache, scale = getattr(step.cache, part), getattr(step.cache, f"{part}_scale")
    slots = step.slots[step.slots >= 0]
    rows = cache.view(torch.uint8)[slots // 16, :, slots % 16].view(cache.dtype)
    if scale is None:
        return dequantize_rows(rows, None).double(), torch.ones((), device=cache.device)
    units = scale.expand(len(slots), -1) if scale.dim() == 1 else scale[slots // 16, :, slots % 16]
    return dequantize_rows(rows, units).double(), units.double()[..., None]


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = ELEMENTWISE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rotates_and_stores_as_it_is(device, backend, geometry, interleaved) -> None:
    for dtype in FLOATS:
        step = make_step(geometry, dtype, dtype, device, interleaved)
        before = step.q.clone()
        assert_near(step.run(backend), turned(step.q, step), dtype)
        assert torch.equal(step.q, before)
        written = step.slots >= 0
        assert_near(stored(step, "key")[0], turned(step.k, step)[written], dtype)
        assert torch.equal(stored(step, "value")[0], step.v[written].double())


@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_values_are_within_their_step(device, backend, geometry, kv_dtype) -> None:
    step = make_step(geometry, torch.float32, kv_dtype, device)
    step.run(backend)
    written = step.slots >= 0
    for part, exact in (("key", turned(step.k, step)), ("value", step.v.double())):
        values, unit = stored(step, part)
        exact = exact[written]
        if kv_dtype == FP8:  # three bits of mantissa; 2^-10 below the smallest normal number
            assert ((values - exact).abs() <= (exact.abs() / 16).clamp(min=unit * 2**-10) * 1.0001).all()
        else:
            largest = 127 if kv_dtype == torch.int8 else 8
            torch.testing.assert_close(unit[..., 0].abs(), exact.abs().amax(-1) / largest, rtol=1e-5, atol=0.0)
            is_cut = (exact / unit > 7.5) & (kv_dtype == torch.uint8)
            assert ((values - exact).abs() <= (0.5001 + 0.5 * is_cut) * unit.abs()).all()
            largest_at = exact.abs().argmax(-1, keepdim=True)  # of either sign it is kept, int4's too
            torch.testing.assert_close(values.gather(-1, largest_at), exact.gather(-1, largest_at), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kv_dtype", [torch.float32, *QUANTIZED_DTYPES], ids=str)
@pytest.mark.parametrize("norm", ["", "before", "after"])
def test_triton_is_the_reference(device, kv_dtype, norm: str) -> None:
    """The same stored values, but for single roundings that lie on the border."""
    for seed, geometry in enumerate(GEOMETRIES):
        ours, reference = (make_step(geometry, torch.float32, kv_dtype, device, seed=seed) for _ in range(2))
        if norm:
            weights = 1 + torch.rand(2, geometry[2], device=device)
            norms = ops.HeadNorms(weights[0], weights[1], 1e-6, norm == "after")
            ours, reference = (replace(step, norms=norms) for step in (ours, reference))
        assert_near(ours.run("triton"), reference.run("reference").double(), torch.float32)
        for part in ("key", "value"):
            (values, unit), (expected, _) = stored(ours, part), stored(reference, part)
            if kv_dtype == torch.float32:
                assert_near(values, expected, torch.float32)
                continue
            off = (values - expected).abs()
            step = expected.abs() / 8 if kv_dtype == FP8 else unit.abs()
            assert (off <= 1.001 * step.clamp(min=unit * 2**-9 if kv_dtype == FP8 else 0)).all()
            assert (off > 1e-4 * step).double().mean() < 0.005


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, *QUANTIZED_DTYPES], ids=str)
def test_nothing_else_is_written(device, backend, kv_dtype) -> None:
    step = make_step(GEOMETRIES[0], torch.float32, kv_dtype, device)
    for tensor in step.cache.block_tensors:
        tensor.view(torch.uint8).fill_(0x55)
    step.run(backend)
    others = torch.ones(48, dtype=torch.bool, device=device)
    others[step.slots[step.slots >= 0]] = False
    for tensor in step.cache.block_tensors:
        rows = tensor.view(torch.uint8).view(3, 2, 16, -1).transpose(1, 2).reshape(48, -1)
        assert (rows[others] == 0x55).all() and not (rows[~others] == 0x55).all(dim=1).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_rotation(device, backend) -> None:
    """ALiBi models: the queries pass through, keys are stored as they come."""
    step = replace(make_step(GEOMETRIES[0], torch.float32, torch.float32, device), rope=None)
    assert step.run(backend) is step.q
    assert torch.equal(stored(step, "key")[0], step.k[step.slots >= 0].double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES, ids=str)
def test_extreme_values(device, backend, kv_dtype) -> None:
    """fp8 saturates instead of becoming NaN; a head of zeros is zeros."""
    step = make_step(GEOMETRIES[0], torch.float32, kv_dtype, device)
    step.v[0], step.v[2], step.v[3] = 1e30, 0.0, -1e30
    step.run(backend)
    values, unit = stored(step, "value")
    assert values.isfinite().all() and not values[1].any()
    if kv_dtype == FP8:
        torch.testing.assert_close(values[0], 448 * unit[0].expand_as(values[0]), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(values[2], -values[0], rtol=0.0, atol=0.0)
    else:
        torch.testing.assert_close(values[2], step.v[3].double(), rtol=1e-5, atol=0.0)


def test_no_tokens(device) -> None:
    step = make_step(GEOMETRIES[0], torch.float32, torch.int8, device)
    none = replace(step, **{name: getattr(step, name)[:0] for name in ("q", "k", "v", "positions", "slots")})
    for backend in BACKENDS:
        assert none.run(backend).shape == (0, 6, 64)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k: ", lambda s: {"k": s.k.half()}),
        ("v: ", lambda s: {"v": s.v[:2]}),
        ("slot_mapping", lambda s: {"slots": s.slots.int()}),
        ("positions", lambda s: {"positions": s.positions[:-1]}),
        ("cos_sin", lambda s: {"rope": ops.Rope(s.rope.cos_sin.half())}),
        ("rotary_dim", lambda s: {"rope": ops.Rope(torch.zeros(31, 66))}),
        ("norms.k", lambda s: {"norms": ops.HeadNorms(torch.ones(64), torch.ones(63), 1e-6)}),
        ("cache.key: dtype torch.float16", lambda s: {"cache": replace(s.cache, key=s.cache.key.half())}),
        ("cache.key: shape", lambda s: {"cache": replace(s.cache, key=s.cache.key[..., :32])}),
        ("cache.value: shape", lambda s: {"cache": replace(s.cache, value=s.cache.value[..., :32])}),
        ("value_scale: torch.int8 needs", lambda s: {"cache": replace(s.cache, value_scale=None)}),
        ("key_scale", lambda s: {"cache": replace(s.cache, key_scale=s.cache.key_scale.double())}),
    ],
)
def test_names_the_bad_argument(name: str, change) -> None:
    step = make_step(GEOMETRIES[0], torch.float32, torch.int8, torch.device("cpu"))
    with pytest.raises(ValueError, match=name):
        replace(step, **change(step)).run("reference")


def test_a_plain_cache_has_no_scales() -> None:
    step = make_step(GEOMETRIES[0], torch.float32, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"key_scale: a cache of .* has none"):
        replace(step, cache=replace(step.cache, key_scale=torch.ones(2))).run("reference")
    with pytest.raises(ValueError, match=r"cache.value: .* expected the keys'"):
        replace(step, cache=replace(step.cache, value=step.cache.value[1:])).run("reference")
