"""Arguments and constants of deterministic mode's kernels, as kernel_signatures.py has those of all others."""

from __future__ import annotations

from expert_signatures import GROUPED, GROUPED_TILE
from kernel_signatures import (
    ATTENTION_SHAPE,
    HEADS,
    INT_MM,
    LATENT,
    LATENT_FP8,
    LATENT_SHAPE,
    TREE_ATTENTION,
    stored,
)

INVARIANT_MM = {
    **INT_MM, "weight_ptr": "*bf16", "partial_ptr": "*fp32",
}  # fmt: skip
INVARIANT_MM_TILE = {
    "IN_FEATURES": 14336, "HAS_SCALES": False, "HAS_BIAS": True, "NUM_PARTS": 14, "SPAN": 1024, "BAND": 8, "BLOCK": 512,
}  # fmt: skip
INVARIANT_TILES = [
    ({"IS_SPLIT": True, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "NUM_STAGES": 5}, 4),
    ({"IS_SPLIT": False, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "NUM_STAGES": 4}, 8),
]  # fmt: skip
INVARIANT_ATTENTION = {
    "QUERIES": 16, "ROWS": 4, "D": 128, "BLOCK_M": 64, "HAS_WINDOW": True, "HAS_TREE": False, "IS_SPLIT": False,
    "NUM_PARTS": 16, "FIRST": 512, "PER_LENGTH": 8,
}  # fmt: skip
PARTS = {"maxima_ptr": "*fp32", "normalisers_ptr": "*fp32"}
LATENT_ROW = {"GROUP": 1, "ROWS": 1, "NUM_KV_HEADS": 128, "D": 512, "BLOCK_D": 512}  # whose parts are merged
INVARIANT_LATENT = {
    **LATENT_SHAPE, "QUERIES": 4, "GROUP": 16, "BLOCK_M": 64, "BLOCK_N": 32, "IS_SPLIT": False, "NUM_PARTS": 16,
    "FIRST": 512, "PER_LENGTH": 8,
}  # fmt: skip

KERNELS = [
    *(
        (
            "invariant_mm", "_invariant_mm_kernel", {**INVARIANT_MM, **weight},
            {**INVARIANT_MM_TILE, **scaled, **tile}, warps,
        )
        for tile, warps in INVARIANT_TILES
        for weight, scaled in (({}, {}), ({"weight_ptr": "*fp8e4nv"}, {"HAS_SCALES": True}))
    ),
    ("invariant_mm", "_add_parts_kernel", INVARIANT_MM, INVARIANT_MM_TILE, 4),
    *(
        (
            "invariant_head_mm", "_invariant_head_mm_kernel",
            {name: kind for name, kind in {**INVARIANT_MM, **HEADS}.items() if name != contiguous},
            {**INVARIANT_MM_TILE, **tile, contiguous: 1, "IN_FEATURES": in_features}, warps,
        )
        for contiguous, in_features in (("weight_feature_stride", 128), ("weight_column_stride", 512))
        for tile, warps in INVARIANT_TILES
    ),
    *(
        (
            "invariant_grouped_mm", "_invariant_grouped_mm_kernel", {**GROUPED, **weight},
            {**GROUPED_TILE, **scaled, **tile, "SPAN": 1024}, warps,
        )
        for tile, warps in INVARIANT_TILES
        for weight, scaled in (({}, {}), ({"weight_ptr": "*fp8e4nv"}, {"HAS_SCALES": True}))
    ),
    *(
        (
            "invariant_attention", "_invariant_attention_kernel", {**TREE_ATTENTION, **cache},
            {**ATTENTION_SHAPE, **INVARIANT_ATTENTION, **tile, "FORMAT": code}, 4,
        )
        for cache, code in (({}, 0), (stored("fp8e4nv"), 1), (stored("u8"), 3))
        for tile in ({}, {"QUERIES": 1, "HAS_TREE": True, "IS_SPLIT": True})
    ),
    ("invariant_attention", "_merge_parts_kernel", TREE_ATTENTION, {**ATTENTION_SHAPE, **INVARIANT_ATTENTION}, 4),
    (
        "invariant_attention", "_merge_parts_kernel", TREE_ATTENTION,
        {**ATTENTION_SHAPE, **INVARIANT_ATTENTION, "HAS_SINKS": False, "HAS_TREE": True, **LATENT_ROW}, 4,
    ),
    *(
        (
            "invariant_latent_attention", "_invariant_latent_attention_kernel", {**rows, **PARTS},
            {**INVARIANT_LATENT, **tile, **form}, 8,
        )
        for rows, form in ((LATENT, {}), (LATENT_FP8, {"IS_FP8": True}))
        for tile in ({}, {"BLOCK_N": 16}, {"QUERIES": 1, "HAS_TREE": True, "IS_SPLIT": True})
    ),
]  # fmt: skip
