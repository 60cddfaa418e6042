"""All layers of a decode step in one CUDA kernel: checks, the table of pointers, the launch.  Hopper only.

No device value is read on the host: CUDA-graph safe.  Launches on one device must follow each other (one stream).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import count_sms
from slipstream_kernels.cuda.device import refusal as device_refusal
from slipstream_kernels.cuda.launch import addresses, fields
from slipstream_kernels.cuda.launch import launch as run
from slipstream_kernels.fp8 import E4M3
from slipstream_kernels.integer import Int4Weight
from slipstream_kernels.kv_cache import FP8_DTYPE
from slipstream_kernels.layer_stack import LayerStack, ScaledRows, StackLayer, StackRows, StackWeight, shape_of

SOURCE = "sm90_decode_layers.cu"
HEAD_DIM, MAX_GROUP, MAX_TOKENS = 128, 8, 8
MAX_LAYERS, MAX_HELD_FEATURES, MAX_OWN_ROWS = 40, 4096, 128  # csrc/decode_layers/layers_shape.cuh, layers_product.cuh
MIN_BLOCK_SIZE, BLOCK = 16, 128
SLICE = {"PlainRows": 128, "Fp8Rows": 256, "Int4Tiles": 256}  # input features of a warp
KV_BYTES = {torch.bfloat16: 2, FP8_DTYPE: 1}
MIN_SHARE = 1  # pieces of keys that a CTA takes at least

# Requests up to which a step is faster so than kernel by kernel, measured on one H200 (docs/measurements).
FASTER_TOKENS = {"PlainRows": 0, "Fp8Rows": 2, "Int4Tiles": 2}
_PREPARED: WeakKeyDictionary[LayerStack, Prepared] = WeakKeyDictionary()

POINTERS = (
    "layers", "embedded", "residual", "heads", "attended", "activated", "partial_out", "partial_state", "arrivals",
    "counters", "cos_sin", "positions", "slot_mapping", "seq_lens", "block_tables",
)  # fmt: skip
COUNTS = (
    "num_layers", "num_tokens", "hidden_size", "qkv_size", "q_size", "intermediate_size", "num_kv_heads", "group",
    "block_size_log2", "num_ctas", "min_share", "slots_under_way",
)  # fmt: skip


class LayersParams(ctypes.Structure):
    """csrc/params/layers_params.h, field by field."""

    _fields_ = [
        *fields(POINTERS, ("table_stride",), COUNTS),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True)
class Launch:
    """How a step is launched; all but the defaults are for measuring."""

    num_ctas: int
    min_share: int = MIN_SHARE
    slots_under_way: int = 3  # below 6: with more, a stage of the ring could come round before it is waited for


@dataclass(frozen=True)
class Prepared:
    """What lives as long as a stack: the pointers of all layers, and what the CTAs of one launch exchange."""

    num_ctas: int
    table: torch.Tensor
    partial_out: torch.Tensor
    partial_state: torch.Tensor
    arrivals: torch.Tensor
    counters: torch.Tensor


def format_of(weight: StackWeight) -> str | None:
    """The weight's format in csrc/decode_layers/layers_formats.cuh; None if there is none."""
    if isinstance(weight, Int4Weight):
        is_tiled = weight.packed.dtype == torch.int32 and weight.zeros is not None  # int4_layout.py's order
        return "Int4Tiles" if is_tiled and weight.group_size == BLOCK else None
    if isinstance(weight, ScaledRows):
        return "Fp8Rows" if weight.values.dtype == E4M3 else None
    return "PlainRows" if weight.dtype == torch.bfloat16 else None


def defines(stack: LayerStack) -> tuple[str, ...]:
    """The macros that choose a library."""
    layer = stack.layers[0]
    return (f"SLIPSTREAM_WEIGHTS={format_of(layer.qkv)}", f"SLIPSTREAM_KV_BYTES={KV_BYTES[layer.cache.dtype]}")


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [(f"SLIPSTREAM_WEIGHTS={name}", f"SLIPSTREAM_KV_BYTES={size}") for name in SLICE for size in (1, 2)]


def refusal(stack: LayerStack) -> str | None:
    """Why this version cannot serve the layers; None if it can."""
    device = stack.layers[0].input_norm.device
    reason = device_refusal(device, "the layers are")
    return reason or shape_refusal(stack, count_sms(device)) or build_refusal(SOURCE, defines(stack))


def shape_refusal(stack: LayerStack, num_ctas: int) -> str | None:
    """The same of shapes and types alone."""
    first = stack.layers[0]
    for layer in stack.layers:
        for norm in (layer.input_norm, layer.post_attention_norm):  # of the activations' type, which weights do not say
            if norm.dtype != torch.bfloat16:
                return f"activations of {norm.dtype} are not bfloat16"
    group = stack.num_q_heads // stack.num_kv_heads
    if stack.head_dim != HEAD_DIM or group > MAX_GROUP:
        return f"heads of {stack.head_dim} in groups of {group}, not of {HEAD_DIM} in at most {MAX_GROUP}"
    if stack.rope.interleaved or stack.rope.rotary_dim != HEAD_DIM:
        return "heads are not turned as a whole, halves apart"
    if len(stack.layers) > MAX_LAYERS:
        return f"{len(stack.layers)} layers are more than {MAX_LAYERS}"
    if first.cache.dtype not in KV_BYTES:
        return f"a cache of {first.cache.dtype} is not bfloat16 or {FP8_DTYPE}"
    block_size = first.cache.block_size
    if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
        return f"block_size {block_size} is not a power of two >= {MIN_BLOCK_SIZE}"
    name = format_of(first.qkv)
    if name is None or any(format_of(weight) != name for layer in stack.layers for weight in layer.products):
        return "weights are not all bfloat16, all e4m3 with a scale for each row, or all int4 in groups of 128"
    return _features_refusal(stack, SLICE[name], num_ctas)


def _features_refusal(stack: LayerStack, size: int, num_ctas: int) -> str | None:
    first = stack.layers[0]
    hidden_size, q_size = shape_of(first.o)
    if max(hidden_size, q_size) > MAX_HELD_FEATURES:
        return f"rows of {max(hidden_size, q_size)} features are more than {MAX_HELD_FEATURES}"
    for features in (hidden_size, q_size, shape_of(first.down)[1]):
        if features % size:
            return f"{features} features are not a multiple of {size}"
    if -(-hidden_size // (16 * num_ctas)) * 16 > MAX_OWN_ROWS:
        return f"{hidden_size} features on {num_ctas} multiprocessors are more than {MAX_OWN_ROWS} each"
    return None


def max_tokens(stack: LayerStack) -> int:
    """Requests up to which this version is faster than the layers' kernels one by one."""
    return FASTER_TOKENS[format_of(stack.layers[0].qkv) or "PlainRows"]


def rows_refusal(rows: StackRows) -> str | None:
    """Why a step cannot be served; None if it can."""
    num_tokens = rows.seq_lens.shape[0]
    return None if 0 < num_tokens <= MAX_TOKENS else f"{num_tokens} tokens are not 1 to {MAX_TOKENS}"


def decode_layers(
    hidden: torch.Tensor, stack: LayerStack, rows: StackRows, launch: Launch | None = None
) -> torch.Tensor:
    """See ops.decode_layers.  One launch."""
    library = load(SOURCE, defines(stack))
    launch = launch or Launch(count_sms(hidden.device))
    residual = torch.empty_like(hidden)
    params, _kept = arguments(hidden, stack, rows, residual, launch)
    run("decode_layers", library, params, hidden.device)
    return residual


def arguments(
    hidden: torch.Tensor, stack: LayerStack, rows: StackRows, residual: torch.Tensor, launch: Launch
) -> tuple[LayersParams, tuple[torch.Tensor, ...]]:
    """The kernel's arguments, and what must live as long as they are used.  Also for its emulator, on a CPU."""
    num_tokens, hidden_size = hidden.shape
    first = stack.layers[0]
    qkv_size, q_size, intermediate_size = shape_of(first.qkv)[0], shape_of(first.o)[1], shape_of(first.down)[1]
    kept = prepared(stack, launch.num_ctas)
    heads, attended, activated = (_unwritten(hidden, size) for size in (qkv_size, q_size, intermediate_size))
    tensors = {
        "layers": kept.table, "embedded": hidden, "residual": residual, "heads": heads, "attended": attended,
        "activated": activated, "partial_out": kept.partial_out, "partial_state": kept.partial_state,
        "arrivals": kept.arrivals, "counters": kept.counters,
        "cos_sin": stack.rope.cos_sin, "positions": rows.positions, "slot_mapping": rows.slot_mapping,
        "seq_lens": rows.seq_lens, "block_tables": rows.block_tables,
    }  # fmt: skip
    params = LayersParams(
        **addresses(tensors),
        table_stride=rows.block_tables.stride(0),
        num_layers=len(stack.layers),
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        qkv_size=qkv_size,
        q_size=q_size,
        intermediate_size=intermediate_size,
        num_kv_heads=stack.num_kv_heads,
        group=stack.num_q_heads // stack.num_kv_heads,
        block_size_log2=first.cache.block_size.bit_length() - 1,
        num_ctas=launch.num_ctas,
        min_share=launch.min_share,
        slots_under_way=launch.slots_under_way,
        eps=stack.eps,
        scale=stack.scale,
    )
    return params, tuple(tensors.values())


def prepared(stack: LayerStack, num_ctas: int) -> Prepared:
    """Made with a stack's first step, and kept as long as it lives: run one before capturing CUDA graphs."""
    found = _PREPARED.get(stack)
    if found is None or found.num_ctas != num_ctas:
        device = stack.layers[0].input_norm.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("decode_layers: a stack's first step lies inside a graph capture; run one before")
        table = torch.tensor([_pointers(layer) for layer in stack.layers], dtype=torch.int64)
        found = _PREPARED[stack] = Prepared(
            num_ctas=num_ctas,
            table=table.to(device),
            partial_out=torch.empty(2 * num_ctas * 8 * HEAD_DIM, dtype=torch.float32, device=device),
            partial_state=torch.empty(2 * num_ctas * 8 * 2, dtype=torch.float32, device=device),
            arrivals=torch.zeros(MAX_TOKENS * stack.num_kv_heads, dtype=torch.int32, device=device),
            counters=torch.zeros(2, dtype=torch.int32, device=device),
        )
    return found


def _unwritten(hidden: torch.Tensor, size: int) -> torch.Tensor:
    """Rows for the kernel to write; on a CPU, where it is emulated, NaN shows what it left out."""
    rows = hidden.new_empty((hidden.shape[0], size))
    return rows if rows.is_cuda else rows.fill_(float("nan"))


def _pointers(layer: StackLayer) -> list[int]:
    """csrc/params/layers_params.h, LayerTensors."""
    parts = [_weight_pointers(weight) for weight in layer.products]
    cache = layer.cache
    others = (layer.input_norm, layer.post_attention_norm, cache.key, cache.value, cache.key_scale, cache.value_scale)
    return [part[kind] for kind in range(3) for part in parts] + [0 if t is None else t.data_ptr() for t in others]


def _weight_pointers(weight: StackWeight) -> tuple[int, int, int]:
    """Of values, scales of rows, and int4's words tile by tile."""
    if isinstance(weight, Int4Weight):
        assert weight.zeros is not None
        return weight.packed.data_ptr(), weight.zeros.data_ptr(), weight.scales[1].data_ptr()
    if isinstance(weight, ScaledRows):
        return weight.values.data_ptr(), weight.scales.data_ptr(), 0
    return weight.data_ptr(), 0, 0
