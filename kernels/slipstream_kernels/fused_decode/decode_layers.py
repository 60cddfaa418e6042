"""decode_layers: contract and choice.  All layers of a decode step of few requests in one launch."""

from __future__ import annotations

import torch

from slipstream_kernels.layer_stack import LayerStack, StackRows, shape_of
from slipstream_kernels.select import load_module, require_shape, select_cuda_or_reference


def decode_layers(hidden: torch.Tensor, stack: LayerStack, rows: StackRows, *, backend: str = "auto") -> torch.Tensor:
    """Run one token of each request through all layers; returns the sum of hidden and all layers' outputs.

    hidden: [num_tokens, hidden_size] embeddings, contiguous.  Every layer's cache gains the tokens' keys and values.
    What rms_norm, skinny_gemm or int4_mm, rope_write_kv and decode_attention do in turn, with their roundings.
    backend: "cuda" (Hopper, ValueError if it cannot run), "reference", "auto".
    Calls with one stack must be ordered, on one stream, the first of them outside of a graph capture.
    """
    _check(hidden, stack, rows)
    version = select_cuda_or_reference(
        "fused_decode.decode_layers",
        backend,
        hidden.is_cuda,
        lambda cuda: cuda.refusal(stack) or cuda.rows_refusal(rows),
    )
    result: torch.Tensor = version.decode_layers(hidden, stack, rows)
    return result


def decode_layers_refusal(stack: LayerStack) -> str | None:
    """Why the one launch cannot serve these layers; None if it can."""
    return load_module("cuda", "fused_decode.decode_layers").refusal(stack)


def max_stacked_tokens(stack: LayerStack) -> int:
    """Requests up to which one launch is faster than the layers' kernels, in layers that it can serve; 0: never."""
    return int(load_module("cuda", "fused_decode.decode_layers").max_tokens(stack))


def _check(hidden: torch.Tensor, stack: LayerStack, rows: StackRows) -> None:
    if not stack.layers:
        raise ValueError("stack: has no layers")
    num_tokens = hidden.shape[0]
    hidden_size = stack.layers[0].input_norm.shape[0]
    require_shape("hidden", hidden, (num_tokens, hidden_size))
    if hidden.dtype != stack.layers[0].input_norm.dtype:
        raise ValueError(
            f"hidden: dtype {hidden.dtype}, expected that of the norms, {stack.layers[0].input_norm.dtype}"
        )
    if not hidden.is_contiguous():
        raise ValueError("hidden: must be contiguous")
    for name, tensor in (
        ("positions", rows.positions),
        ("slot_mapping", rows.slot_mapping),
        ("seq_lens", rows.seq_lens),
    ):
        require_shape(f"rows.{name}", tensor, (num_tokens,))
    q_size, kv_size = stack.num_q_heads * stack.head_dim, stack.num_kv_heads * stack.head_dim
    for index, layer in enumerate(stack.layers):
        intermediate = shape_of(layer.down)[1]
        expected = {
            "qkv": (q_size + 2 * kv_size, hidden_size), "o": (hidden_size, q_size),
            "gate_up": (2 * intermediate, hidden_size), "down": (hidden_size, intermediate),
        }  # fmt: skip
        for (name, shape), weight in zip(expected.items(), layer.products):
            if shape_of(weight) != shape:
                raise ValueError(f"stack.layers[{index}].{name}: shape {shape_of(weight)}, expected {shape}")
