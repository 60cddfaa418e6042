"""Arguments and constants of the kernels of MoE layers, as kernel_signatures.py has those of all others."""

from __future__ import annotations

import triton
from kernel_signatures import MXFP4

GROUPED = {
    "x_ptr": "*bf16", "x_scales_ptr": "*fp32", "tokens_ptr": "*i32", "offsets_ptr": "*i32", "weight_ptr": "*bf16",
    "packed_ptr": "*u8", "zeros_ptr": "*u8", "scales_ptr": "*fp32", "out_ptr": "*bf16", "x_row_stride": "i32",
    "out_features": "i32", "num_tiles": "i32", "x_scales_stride": "i32", "scales_row_stride": "i32",
}  # fmt: skip
GROUPED_FP8 = {**GROUPED, "x_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv"}
GROUPED_TILE = {
    "IN_FEATURES": 4096, "NUM_EXPERTS": 60, "EXPERTS_PADDED": 64, "BY_TOKEN": True, "GATED": True, "BLOCK_M": 64,
    "BLOCK_N": 64, "BLOCK_K": 64, "NUM_STAGES": 4, "GROUP_TILES": 16, "HAS_X_SCALES": False, "HAS_SCALES": False,
    "GROUP_SIZE": 64, "HAS_ZEROS": True, "IS_E2M1": False, "FACTOR": triton.language.bfloat16, "IS_BLOCKWISE": False,
    "IS_INT8": False,
}  # fmt: skip
GROUPED_FP8_TILE = {**GROUPED_TILE, "BLOCK_K": 128, "HAS_X_SCALES": True, "HAS_SCALES": True}
MXFP4_BYTES = {"packed_ptr": "*u8", "scales_ptr": "*u8", "out_ptr": "*bf16", "num_bytes": "i32"}
W4A16_TILES = {
    "qweight_ptr": "*u8", "scales_ptr": "*i32", "channel_ptr": "*fp32", "out_ptr": "*fp8e4nv", "num_tiles": "i32",
}  # fmt: skip
W4A16_SHAPE = {"IN_FEATURES": 1408, "GROUPS": 2, "IS_CHANNELWISE": False, "IS_E4M3": True}
GROUPED_MXFP4_TILE = {**GROUPED_TILE, **MXFP4, "BLOCK_K": 128}
ROUTES = {
    "logits_ptr": "*bf16", "logit_bias_ptr": "*bf16", "bias_ptr": "*fp32", "scale": "fp32",
    "experts_ptr": "*i32", "weights_ptr": "*fp32", "rows_ptr": "*i32", "tokens_ptr": "*i32",
    "offsets_ptr": "*i32", "y_ptr": "*bf16", "out_ptr": "*bf16", "logits_row_stride": "i32", "num_tokens": "i32",
    "num_pairs": "i32", "y_row_stride": "i32", "size": "i32", "alpha": "fp32", "limit": "fp32",
    "shared_ptr": "*bf16", "gate_ptr": "*bf16",
}  # fmt: skip
ROUTES_SHAPE = {
    "NUM_EXPERTS": 60, "EXPERTS_PADDED": 64, "TOP_K": 2, "RENORMALISE": True, "BLOCK_M": 32, "BLOCK": 1024,
    "IS_SIGMOID": False, "HAS_BIAS": False, "HAS_SHARED": False, "HAS_GATE": False, "NUM_GROUPS": 1, "TOPK_GROUPS": 1,
    "SUMS_TWO": False, "HAS_LOGIT_BIAS": False,
}  # fmt: skip
GROUP_ROUTES = {"IS_SIGMOID": True, "HAS_BIAS": True, "NUM_GROUPS": 4, "TOPK_GROUPS": 2, "SUMS_TWO": True}

KERNELS = [
    ("route_experts", "_route_experts_kernel", ROUTES, ROUTES_SHAPE, 4),
    ("route_experts", "_choose_experts_kernel", ROUTES, ROUTES_SHAPE, 4),
    ("route_experts", "_route_experts_kernel", ROUTES, {**ROUTES_SHAPE, **GROUP_ROUTES, "BLOCK_M": 8}, 4),
    ("route_experts", "_choose_experts_kernel", ROUTES, {**ROUTES_SHAPE, **GROUP_ROUTES}, 4),
    *(
        ("route_experts", kernel, {**ROUTES, "logits_ptr": "*fp32"}, {**ROUTES_SHAPE, "HAS_LOGIT_BIAS": True}, 4)
        for kernel in ("_route_experts_kernel", "_choose_experts_kernel")
    ),
    ("route_experts", "_sort_experts_kernel", ROUTES, ROUTES_SHAPE, 4),
    ("combine_experts", "_combine_experts_kernel", ROUTES, ROUTES_SHAPE, 4),
    ("combine_experts", "_combine_experts_kernel", ROUTES, {**ROUTES_SHAPE, "HAS_SHARED": True, "HAS_GATE": True}, 4),
    *(
        ("combine_experts", kernel, {**ROUTES, "bias_ptr": "*bf16"}, {**ROUTES_SHAPE, "HAS_BIAS": True}, 4)
        for kernel in ("_combine_experts_kernel", "_gate_experts_kernel")
    ),
    ("grouped_mm", "_grouped_mm_kernel", GROUPED, GROUPED_TILE, 4),
    ("grouped_mm", "_grouped_mm_kernel", GROUPED_FP8, GROUPED_FP8_TILE, 4),
    ("grouped_mm", "_grouped_mm_kernel", GROUPED_FP8, {**GROUPED_FP8_TILE, "IS_BLOCKWISE": True}, 4),
    (
        "grouped_mm", "_grouped_mm_kernel", {**GROUPED, "weight_ptr": "*i8"},
        {**GROUPED_TILE, "HAS_SCALES": True}, 4,
    ),
    (
        "grouped_mm", "_grouped_mm_kernel", {**GROUPED, "x_ptr": "*i8", "weight_ptr": "*i8"},
        {**GROUPED_FP8_TILE, "IS_INT8": True}, 4,
    ),
    ("grouped_int4_mm", "_grouped_int4_mm_kernel", GROUPED, GROUPED_TILE, 4),
    ("grouped_int4_mm", "_grouped_int4_mm_kernel", {**GROUPED, "scales_ptr": "*u8"}, GROUPED_MXFP4_TILE, 4),
    ("dequantise_w4a16", "_dequantise_w4a16_kernel", W4A16_TILES, W4A16_SHAPE, 4),
    *(
        ("dequantise_w4a16", "_dequantise_w4a16_kernel", {**W4A16_TILES, "out_ptr": dtype},
         {**W4A16_SHAPE, "IS_E4M3": False, "IS_CHANNELWISE": is_channelwise}, 4)
        for dtype, is_channelwise in (("*bf16", False), ("*fp16", True))
    ),
    (
        "dequantise_w4a8", "_dequantise_w4a8_kernel",
        {"qweight_ptr": "*u8", "out_ptr": "*fp8e4nv", "num_tiles": "i32", "half_features": "i32"},
        {"IN_FEATURES": 1408, "TILE_BYTES": 1088}, 4,
    ),
    ("dequantise_mxfp4", "_dequantise_mxfp4_kernel", MXFP4_BYTES, {"GROUP_BYTES": 16, "BLOCK": 2048}, 4),
]  # fmt: skip
