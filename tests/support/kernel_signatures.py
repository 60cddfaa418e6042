"""Arguments and constants that every Triton-lang kernel is compiled with, of the shapes that models have."""

from __future__ import annotations

import triton
from slipstream_kernels.norm.gated_mul import ACTIVATIONS

STRIDES = {"row_stride": "i32", "vocab_size": "i32"}
ATTENTION = {
    "q_ptr": "*bf16", "key_cache_ptr": "*bf16", "value_cache_ptr": "*bf16", "key_scale_ptr": "*fp32",
    "value_scale_ptr": "*fp32", "out_ptr": "*bf16", "partial_ptr": "*fp32", "lse_ptr": "*fp32", "tables_ptr": "*i32",
    "query_start_loc_ptr": "*i32", "seq_lens_ptr": "*i32",
    "num_requests": "i32", "slopes_ptr": "*fp32", "sinks_ptr": "*fp32", "scale": "fp32", "window": "i32",
    "soft_cap": "fp32", "token_stride": "i32", "head_stride": "i32", "table_stride": "i32", "blocks_of_request": "i32",
    "key_ptr": "*bf16", "value_ptr": "*bf16", "mean_ptr": "*fp32", "keys_ptr": "*fp8e4nv", "values_ptr": "*fp8e4nv",
}  # fmt: skip
TREE_ATTENTION = {
    **ATTENTION, "maxima_ptr": "*fp32", "normalisers_ptr": "*fp32", "tree_mask_ptr": "*i64", "positions_ptr": "*i64",
}  # fmt: skip
ATTENTION_SHAPE = {
    "GROUP": 4, "NUM_KV_HEADS": 8, "BLOCK_SIZE": 64, "D": 80, "BLOCK_D": 128, "BLOCK_N": 64, "FORMAT": 0,
    "HAS_SCALE": False, "HAS_WINDOW": True, "HAS_ALIBI": True, "HAS_SOFT_CAP": True, "HAS_SINKS": True,
}  # fmt: skip
PLAIN = {
    "BLOCK_M": 128, "MIN_QUERY_LEN": 1, "HAS_WINDOW": False, "HAS_ALIBI": False, "HAS_SOFT_CAP": False,
    "HAS_SINKS": False,
}  # fmt: skip
SHORT = {"NUM_TILES": 1, "MAX_QUERY_LEN": 16, "NUM_ROWS": 16}

SMALL_LATENT_TILES = ((32, 32), (64, 16))  # where a program has 99 KiB of shared memory

ACCEPT = {
    **{f"{name}_ptr": "*i64" for name in ("token_ids", "next_ids", "slots", "masks")},
    **{f"{name}_ptr": "*i64" for name in ("paths", "last", "sources", "targets")},
    **{f"{name}_ptr": "*i32" for name in ("starts", "num_drafts", "counts")},
    "marks_ptr": "*i8", "scores_ptr": "*fp32", "num_words": "i32",
}  # fmt: skip
ADVANCE = {
    **ACCEPT,
    **{f"{name}_ptr": "*i64" for name in ("positions", "drafts", "words", "depths")},
    **{f"{name}_ptr": "*i32" for name in ("seq_lens", "tables")},
    **dict.fromkeys(("table_stride", "table_width", "draft_stride", "word_stride", "depth_stride"), "i32"),
    "block_size": "i32", "num_rows": "i32",
}  # fmt: skip
LEVEL = {
    **{f"{name}_ptr": "*i64" for name in ("positions", "last", "deep", "slots")},
    **{f"{name}_ptr": "*i32" for name in ("seq_lens", "tables", "ends")},
    **dict.fromkeys(("table_stride", "table_width", "first", "num_rows", "rows_per_level"), "i32"),
    "block_size": "i32", "num_positions": "i32",
}  # fmt: skip
UNPACK = {
    **{f"{name}_ptr": "*i32" for name in ("size", "arrived", "tables")},
    **{f"{name}_ptr": "*i64" for name in ("pending", "token_ids", "drawn")},
    **dict.fromkeys(("group_stride", "table_stride", "num_requests", "num_rows", "num_tokens"), "i32"),
}  # fmt: skip
LORA = {
    **{f"{name}_ptr": "*bf16" for name in ("x", "y", "a", "b")}, "inner_ptr": "*fp32", "slots_ptr": "*i32",
    "rows_ptr": "*i32",
    **dict.fromkeys(("x_row_stride", "a_part_stride", "in_features", "features_per_sum", "num_tiles"), "i32"),
    **dict.fromkeys(("num_parts", "y_row_stride", "out_features"), "i32"),
}  # fmt: skip
LORA_TILE = {"RANK": 16, "TILE_ROWS": 16, "BLOCK_RANKS": 16}
MOVES = {"addresses": "*i64", "sources": "*i64", "targets": "*i64", "counts": "*i32", "most": "i32"}

FP8_ROWS = {
    "x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "summed_ptr": "*bf16", "values_ptr": "*fp8e4nv",
    "scales_ptr": "*fp32", "scale_ptr": "*fp32", "sums_ptr": "*fp32", "x_row_stride": "i32",
    "residual_row_stride": "i32", "num_rows": "i32", "eps": "fp32",
}  # fmt: skip
FP8_TILE = {
    "SIZE": 3584, "NUM_GROUPS": 28, "GROUPS": 32, "COLUMNS": 128, "IS_STATIC": False, "HAS_RESIDUAL": True,
    "SUM_COLUMNS": 0,
}  # fmt: skip
FP8_TOTALLED = {**FP8_TILE, "NUM_GROUPS": 1, "GROUPS": 1, "COLUMNS": 4096, "SUM_COLUMNS": 128}
SCALED_MM = {
    "x_ptr": "*fp8e4nv", "x_scales_ptr": "*fp32", "weight_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "bias_ptr": "*bf16",
    "out_ptr": "*bf16", "partial_ptr": "*fp32", "counters_ptr": "*i32", "num_tokens": "i32", "num_rows": "i32",
    "out_features": "i32", "scales_row_stride": "i32",
}  # fmt: skip
SCALED_MM_TILE = {
    "IN_FEATURES": 4096, "HAS_BIAS": True, "NUM_SPLITS": 4, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128,
    "NUM_STAGES": 5, "IS_INT8": False,
}  # fmt: skip
INT_MM = {
    "x_ptr": "*bf16", "x_scales_ptr": "*fp32", "packed_ptr": "*u8", "values_ptr": "*i8", "scales_ptr": "*fp32",
    "zeros_ptr": "*u8", "bias_ptr": "*bf16", "out_ptr": "*bf16", "x_row_stride": "i32", "num_tokens": "i32",
    "out_features": "i32",
}  # fmt: skip
INT_MM_TILE = {
    "IN_FEATURES": 4096, "GROUP_SIZE": 128, "HAS_X_SCALES": False, "HAS_ZEROS": True, "HAS_BIAS": True, "BLOCK_M": 64,
    "BLOCK_N": 64, "BLOCK_K": 128, "FACTOR": triton.language.bfloat16, "IS_INT8": False, "IS_E2M1": False,
}  # fmt: skip
HEADS = {
    **{f"{name}_stride": "i32" for name in ("x_token", "x_head", "weight_head", "weight_feature", "weight_column")},
    "out_token_stride": "i32", "out_head_stride": "i32",
}  # fmt: skip
HEAD_MM = {**HEADS, **{name: INT_MM[name] for name in ("x_ptr", "out_ptr", "num_tokens", "out_features")}}
HEAD_MM |= {"weight_ptr": "*bf16", "in_features": "i32", "num_heads": "i32"}
MXFP4 = {"IN_FEATURES": 2880, "GROUP_SIZE": 32, "HAS_ZEROS": False, "IS_E2M1": True}
FP8_INPUTS = {"HAS_X_SCALES": True, "HAS_ZEROS": False, "BLOCK_M": 16}

INT4_BYTES = {"packed_ptr": "*u8", "scales_ptr": "*fp32", "zeros_ptr": "*u8", "out_ptr": "*bf16"}
INT4_BYTES_TILE = {"ROW_BYTES": 5472, "GROUP_BYTES": 32, "UNIT": 32, "UNITS": 64, "HAS_ZEROS": True}

ROPE = {
    "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "q_out_ptr": "*bf16", "positions_ptr": "*i64",
    "slot_mapping_ptr": "*i64", "cos_sin_ptr": "*fp32", "q_norm_ptr": "*bf16", "k_norm_ptr": "*bf16",
    "key_cache_ptr": "*bf16", "value_cache_ptr": "*bf16", "key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32",
    "q_token_stride": "i32", "q_head_stride": "i32", "k_token_stride": "i32", "k_head_stride": "i32",
    "v_token_stride": "i32", "v_head_stride": "i32", "eps": "fp32",
}  # fmt: skip
ROPE_SHAPE = {
    "NUM_Q_HEADS": 32, "NUM_KV_HEADS": 5, "HEAD_DIM": 80, "DIM_PADDED": 128, "BLOCK_SIZE": 64, "Q_TILES": 2,
    "Q_HEADS": 16, "KV_HEADS": 8, "ROTARY_DIM": 80, "INTERLEAVED": False, "RUN": 8, "HAS_ROPE": True,
    "NORMS_BEFORE": True, "NORMS_AFTER": False, "HAS_SCALE": True,
}  # fmt: skip

SAMPLE = {
    **STRIDES, "logits_ptr": "*fp32", "out_ptr": "*i64", "maxima_ptr": "*fp32", "sums_ptr": "*fp32",
    "winners_ptr": "*i32", "group_maxima_ptr": "*fp32", "scratch_ptr": "*i32", "temperature_ptr": "*fp32",
    "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i64",
}  # fmt: skip
SAMPLE_SHAPE = {
    "NUM_CHUNKS": 32, "CHUNKS_PADDED": 32, "CHUNK": 4096, "GROUP": 8, "NUM_GROUPS": 16384, "GROUPS_PADDED": 16384,
    "CAPACITY": 2048, "MOST": 1536, "TOKENS": 2048, "SLOW_BLOCK": 2048,
    "HAS_TOP_K": True, "HAS_TOP_P": True, "HAS_MIN_P": True,
}  # fmt: skip


def stored(dtype: str) -> dict[str, str]:
    """Types of a cache's pointers."""
    return {"key_cache_ptr": f"*{dtype}", "value_cache_ptr": f"*{dtype}"}


LATENT_ROWS = {
    "values_ptr": "*bf16", "scales_ptr": "*fp32", "rope_ptr": "*bf16", "values_stride": "i32", "scales_stride": "i32",
    "rope_stride": "i32", "tables_ptr": "*i32", "num_requests": "i32", "table_stride": "i32", "out_ptr": "*bf16",
}  # fmt: skip
LATENT = {
    **LATENT_ROWS,
    **{f"{name}_ptr": "*i32" for name in ("first", "lens", "starts", "query_start_loc", "seq_lens")},
    **{f"{name}_ptr": "*fp32" for name in ("partial", "lse", "other_lse", "cos_sin")},
    **{f"{name}_ptr": "*i64" for name in ("tree_mask", "positions", "slot_mapping")},
    **{f"{name}_ptr": "*bf16" for name in ("q", "q_out", "latent", "norm", "other")},
    **{f"{name}_stride": "i32" for name in ("q_token", "q_head", "out_token", "out_head", "latent")},
    "scale": "fp32", "eps": "fp32",
}  # fmt: skip
LATENT_FP8 = {**LATENT, "values_ptr": "*fp8e4nv"}
LATENT_SHAPE = {
    "HEADS": 16, "NUM_SPLITS": 8, "RANK": 512, "ROPE": 64, "BLOCK_SIZE": 64, "BLOCK_R": 512, "BLOCK_P": 64,
    "BLOCK_M": 16, "BLOCK_N": 64, "IS_FP8": False, "HAS_TREE": False, "D": 128, "BLOCK_D": 128, "COLUMNS": 128,
}  # fmt: skip
WRITE_LATENT_SHAPE = {
    **LATENT_SHAPE, "NUM_HEADS": 16, "GROUPS": 1, "COLUMNS": 512, "GROUP": 512, "HALF": 32, "HALF_PADDED": 32,
    "INTERLEAVED": True,
}  # fmt: skip
FP8_LATENT_ROW = {"HEADS": 16, "GROUPS": 4, "COLUMNS": 128, "GROUP": 128, "IS_FP8": True}
RAGGED = {
    **{f"{name}_ptr": "*bf16" for name in ("q", "k", "k_rope", "v", "out")}, "lse_ptr": "*fp32", "scale": "fp32",
    **{f"{name}_ptr": "*i32" for name in ("query_start_loc", "key_start_loc", "key_lens")}, "num_requests": "i32",
    **{f"{name}_stride": "i32" for name in ("q_token", "q_head", "k_token", "k_head", "k_rope", "v_token", "v_head")},
}  # fmt: skip
RAGGED_SHAPE = {
    "HEADS": 16, "NOPE": 128, "ROPE": 64, "VALUE": 128, "BLOCK_D": 128, "BLOCK_P": 64, "BLOCK_V": 128, "BLOCK_M": 128,
    "BLOCK_N": 64, "IS_CAUSAL": True,
}  # fmt: skip

LOGPROBS = {
    **STRIDES, "logits_ptr": "*bf16", "chosen_ptr": "*i64", "maxima_ptr": "*fp32", "sums_ptr": "*fp32",
    "num_better_ptr": "*i32", "group_maxima_ptr": "*bf16", "slots_ptr": "*i32", "log_normaliser_ptr": "*fp32",
    "logprob_ptr": "*fp32", "rank_ptr": "*i64", "values_ptr": "*fp32", "token_ids_ptr": "*i64",
}  # fmt: skip

# module, kernel, types of its run-time arguments, values of its constants (each may list more than the kernel takes)
KERNELS = [
    ("prefill_attention", "_prefill_kernel", ATTENTION, {**ATTENTION_SHAPE, "BLOCK_M": 128, "MIN_QUERY_LEN": 17}, 8),
    ("prefill_attention", "_prefill_kernel", ATTENTION, {**ATTENTION_SHAPE, **PLAIN, "D": 128}, 8),
    ("paged_attention", "_short_kernel", ATTENTION, {**ATTENTION_SHAPE, **SHORT, "BLOCK_M": 16, "NUM_SPLITS": 8}, 4),
    ("paged_attention", "_short_kernel", ATTENTION, {**ATTENTION_SHAPE, **SHORT, "BLOCK_M": 16, "NUM_SPLITS": 1}, 4),
    *(
        (module, kernel, {**ATTENTION, **stored(dtype)},
         {**ATTENTION_SHAPE, **PLAIN, **SHORT, "BLOCK_M": block_m, "NUM_SPLITS": 8, "D": 128, "FORMAT": code,
          "HAS_SCALE": True}, num_warps)
        for code, dtype in ((1, "fp8e4nv"), (2, "i8"), (3, "u8"))
        for module, kernel, block_m, num_warps in (
            ("prefill_attention", "_prefill_kernel", 128, 8), ("paged_attention", "_short_kernel", 16, 4)
        )
    ),
    ("latent_attention", "_latent_attention_kernel", LATENT, LATENT_SHAPE, 4),
    ("latent_attention", "_latent_attention_kernel", LATENT, {**LATENT_SHAPE, "BLOCK_M": 64, "HAS_TREE": True}, 8),
    *(
        ("latent_attention", "_latent_attention_kernel", LATENT, {**LATENT_SHAPE, "BLOCK_M": rows, "BLOCK_N": keys}, 8)
        for rows, keys in SMALL_LATENT_TILES
    ),
    ("latent_attention", "_latent_attention_kernel", LATENT_FP8, {**LATENT_SHAPE, "IS_FP8": True, "BLOCK_N": 32}, 4),
    ("latent_attention", "_merge_splits_kernel", LATENT, {**LATENT_SHAPE, "NUM_SPLITS": 64}, 4),
    ("merge_attention", "_merge_attention_kernel", LATENT, LATENT_SHAPE, 1),
    ("write_latent", "_write_latent_kernel", LATENT, WRITE_LATENT_SHAPE, 2),
    (
        "write_latent", "_write_latent_kernel", LATENT_FP8, {**WRITE_LATENT_SHAPE, **FP8_LATENT_ROW}, 2,
    ),
    *(
        (
            "absorb_latent", "_absorb_latent_kernel",
            {**rows, **{f"keys_{name}_stride": "i32" for name in ("head", "column")}, "num_tokens": "i32",
             "num_pairs": "i32", "in_features": "i32", "x_ptr": "*bf16", "keys_ptr": "*bf16"},
            {**WRITE_LATENT_SHAPE, **shape, "keys_feature_stride": 1, "PADDED": 128, "BLOCK_M": tokens}, 4,
        )
        for rows, shape in ((LATENT, {}), (LATENT_FP8, FP8_LATENT_ROW))
        for tokens in (16, 64)
    ),
    ("gather_latent", "_gather_latent_kernel", LATENT, LATENT_SHAPE, 1),
    ("gather_latent", "_gather_latent_kernel", LATENT_FP8, {**LATENT_SHAPE, "IS_FP8": True}, 1),
    ("ragged_attention", "_ragged_attention_kernel", RAGGED, RAGGED_SHAPE, 8),
    (
        "ragged_attention", "_ragged_attention_kernel", RAGGED,
        {**RAGGED_SHAPE, "NOPE": 192, "VALUE": 256, "BLOCK_D": 256, "BLOCK_V": 256, "BLOCK_M": 64, "BLOCK_N": 32}, 4,
    ),
    ("paged_attention", "_merge_kernel", ATTENTION, {**ATTENTION_SHAPE, **SHORT, "NUM_SPLITS": 8}, 4),
    (
        "rms_norm", "_rms_norm_kernel",
        {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "summed_ptr": "*bf16",
         "x_token_stride": "i32", "x_head_stride": "i32", "residual_token_stride": "i32",
         "residual_head_stride": "i32", "eps": "fp32"},
        {"NUM_HEADS": 1, "SIZE": 4096, "SIZE_PADDED": 4096, "HAS_RESIDUAL": True}, 8,
    ),
    ("stage_fp8", "_stage_fp8_kernel", ATTENTION, {**ATTENTION_SHAPE, "ROWS": 64, "HAS_KEYS": True}, 4),
    (
        "stage_fp8", "_stage_fp8_kernel", {**ATTENTION, "value_ptr": "*fp8e4nv"},
        {**ATTENTION_SHAPE, "ROWS": 64, "HAS_KEYS": False}, 4,
    ),
    ("rope_write_kv", "_rope_write_kv_kernel", ROPE, {**ROPE_SHAPE, "FORMAT": 0}, 4),
    (
        "rope_write_kv", "_rope_write_kv_kernel", ROPE,
        {**ROPE_SHAPE, "NORMS_BEFORE": False, "NORMS_AFTER": True, "FORMAT": 0}, 4,
    ),
    ("rope_write_kv", "_rope_write_kv_kernel", {**ROPE, **stored("fp8e4nv")}, {**ROPE_SHAPE, "FORMAT": 1}, 4),
    ("rope_write_kv", "_rope_write_kv_kernel", {**ROPE, **stored("i8")}, {**ROPE_SHAPE, "FORMAT": 2}, 4),
    ("rope_write_kv", "_rope_write_kv_kernel", {**ROPE, **stored("u8")}, {**ROPE_SHAPE, "FORMAT": 3}, 4),
    (
        "compact_kv", "_move_kernel",
        {"addresses": "*i64", "sources": "*i64", "targets": "*i64", "counts": "*i32", "most": "i32"},
        {"NUM_HEADS": 8, "BLOCK_SIZE": 64, "HAS_WORDS": False, "WIDTH": 20, "WIDTH_PADDED": 32}, 1,
    ),
    *(
        ("gated_mul", "_gated_mul_kernel",
         {"x_ptr": "*bf16", "out_ptr": "*bf16", "x_token_stride": "i32", "size": "i32"},
         {"ACTIVATION": activation, "BLOCK": 1024}, 4)
        for activation in ACTIVATIONS
    ),
    *(
        (name, f"_{name}_kernel", FP8_ROWS, tile, 8)
        for name in ("quantize_fp8", "rms_norm_fp8")
        for tile in (FP8_TILE, FP8_TOTALLED)
    ),
    *(
        ("gated_mul_fp8", "_gated_mul_fp8_kernel", FP8_ROWS, {**tile, "ACTIVATION": activation}, 8)
        for activation in ACTIVATIONS
        for tile in (FP8_TILE, FP8_TOTALLED)
    ),
    ("scaled_mm", "_scaled_mm_kernel", SCALED_MM, {**SCALED_MM_TILE, "IS_BLOCKWISE": True}, 4),
    ("scaled_mm", "_scaled_mm_kernel", SCALED_MM, {**SCALED_MM_TILE, "IS_BLOCKWISE": False}, 4),
    ("scaled_mm", "_scaled_mm_kernel", {**SCALED_MM, "x_ptr": "*i8", "weight_ptr": "*i8", "partial_ptr": "*i32"},
     {**SCALED_MM_TILE, "IS_BLOCKWISE": False, "IS_INT8": True}, 4),
    ("int4_mm", "_int4_mm_kernel", INT_MM, INT_MM_TILE, 4),
    ("int4_mm", "_int4_mm_kernel", {**INT_MM, "x_ptr": "*fp8e4nv"}, {**INT_MM_TILE, **FP8_INPUTS}, 4),
    ("int4_mm", "_int4_mm_kernel", {**INT_MM, "scales_ptr": "*u8"}, {**INT_MM_TILE, **MXFP4}, 4),
    ("int8_mm", "_int8_mm_kernel", INT_MM, INT_MM_TILE, 4),
    ("int8_mm", "_int8_mm_kernel", {**INT_MM, "x_ptr": "*i8"}, {**INT_MM_TILE, "IS_INT8": True}, 4),
    (
        "int8_dequantise", "_int8_dequantise_kernel", {"words_ptr": "*i32", "scales_ptr": "*fp32", "out_ptr": "*bf16"},
        {"ROW_RUNS": 256, "RUNS": 256}, 8,
    ),
    ("int4_dequantise", "_int4_dequantise_kernel", INT4_BYTES, INT4_BYTES_TILE, 4),
    (
        "int4_dequantise", "_int4_dequantise_kernel", {**INT4_BYTES, "out_ptr": "*fp16"},
        {"ROW_BYTES": 2048, "GROUP_BYTES": 16, "UNIT": 16, "UNITS": 128, "HAS_ZEROS": False}, 4,
    ),
    *(
        (
            "head_mm", "_head_mm_kernel", {name: kind for name, kind in HEAD_MM.items() if name != contiguous},
            {contiguous: 1, "PADDED": padded, "BLOCK_M": rows, "BLOCK_N": features}, 4,
        )
        for contiguous, padded, features in (("weight_feature_stride", 128, 64), ("weight_column_stride", 512, 16))
        for rows in (16, 64)
    ),
    ("quantize_int8", "_quantize_int8_kernel", {**FP8_ROWS, "values_ptr": "*i8"}, FP8_TILE, 8),
    (
        "logprobs", "_logprob_chunk_kernel", LOGPROBS,
        {"NUM_CHUNKS": 32, "CHUNK": 4096, "GROUP": 8, "HAS_TOP": True}, 8,
    ),
    (
        "logprobs", "_logprob_row_kernel", LOGPROBS,
        {"NUM_CHUNKS": 32, "CHUNKS_PADDED": 32, "NUM_GROUPS": 16384, "GROUPS_PADDED": 16384, "GROUP": 8,
         "CAPACITY": 64, "K": 20}, 8,
    ),
    *(
        ("scale_logits", "_scale_logits_kernel",
         {**STRIDES, "logits_ptr": "*bf16", "out_ptr": "*fp32", "factor": "fp32", "soft_cap": "fp32"},
         {"HAS_SOFT_CAP": has_soft_cap, "BLOCK": 1024}, 4)
        for has_soft_cap in (False, True)
    ),
    (
        "penalties", "_count_kernel",
        {"history_stride": "i32", "vocab_size": "i32", "token_ids_ptr": "*i64", "prompt_lens_ptr": "*i32",
         "num_tokens_ptr": "*i32", "counts_ptr": "*i32"},
        {"BLOCK": 1024}, 4,
    ),
    (
        "penalties", "_penalise_kernel",
        {**STRIDES, "logits_ptr": "*fp32", "counts_ptr": "*i32", "repetition_ptr": "*fp32", "presence_ptr": "*fp32",
         "frequency_ptr": "*fp32"},
        {"HAS_REPETITION": True, "HAS_PRESENCE": True, "HAS_FREQUENCY": True, "BLOCK": 1024}, 4,
    ),
    (
        "penalties", "_bias_kernel",
        {**STRIDES, "logits_ptr": "*fp32", "rows_ptr": "*i64", "token_ids_ptr": "*i64", "values_ptr": "*fp32",
         "num_biases": "i32"},
        {"BLOCK": 1024}, 4,
    ),
    (
        "token_masks", "_mask_kernel",
        {**STRIDES, "logits_ptr": "*fp32", "rows_ptr": "*i64", "bits_ptr": "*i32", "num_words": "i32"},
        {"BLOCK": 1024}, 4,
    ),
    (
        "compact_kv", "_move_kernel", MOVES,
        {"NUM_HEADS": 8, "BLOCK_SIZE": 64, "HAS_WORDS": True, "WIDTH": 64, "WIDTH_PADDED": 64}, 1,
    ),
    ("prepare_draft_inputs", "_level_kernel", LEVEL, {"ROWS": 16}, 1),
    ("update_step_inputs", "_advance_kernel", ADVANCE, {"HAS_TREE": True, "HAS_MASK": True, "ROWS": 64}, 1),
    ("unpack_step_inputs", "_unpack_kernel", UNPACK, {"BLOCK": 1024}, 4),
    (
        "accept_drafts", "_accept_kernel", ACCEPT,
        {"HAS_TREE": True, "HAS_MARKS": True, "HAS_SCORES": True, "ROWS": 64}, 4,
    ),
    ("sample", "_chunk_kernel", SAMPLE, SAMPLE_SHAPE, 8),
    ("sample", "_choose_kernel", SAMPLE, SAMPLE_SHAPE, 32),
    ("greedy", "_greedy_chunk_kernel", SAMPLE, SAMPLE_SHAPE, 8),
    ("greedy", "_greedy_row_kernel", SAMPLE, SAMPLE_SHAPE, 1),
    ("lora_shrink", "_lora_shrink_kernel", LORA, {**LORA_TILE, "BLOCK_FEATURES": 512}, 4),
    (
        "lora_expand", "_lora_expand_kernel", LORA,
        {**LORA_TILE, "END_0": 4096, "END_1": 5120, "END_2": 6144, "END_3": 6144, "ALIGN": 16, "NUM_SUMS": 8,
         "BLOCK_COLUMNS": 128}, 4,
    ),
]  # fmt: skip
