"""triton.jit for kernels whose arguments change from step to step.

Triton-lang compiles a kernel once more for an integer that is 1, or that 16 divides, and for a pointer that 16 divides.
For an argument that changes from step to step this would happen in the middle of serving, and take the better part of
a second in which no request gets a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton

# Names of arguments in all kernels: numbers of a step's rows, and what its shapes are laid out by.
INTEGERS = frozenset({
    "num_tokens", "num_requests", "num_rows", "num_pairs", "num_tiles", "num_positions", "num_biases", "num_words",
    "draft_stride", "word_stride", "depth_stride",
    "rows_per_level", "blocks_of_request", "table_stride", "table_width", "x_scales_stride", "history_stride", "first",
    "most", "group_stride",
})  # fmt: skip
# Tensors with a number for each token or request, which may begin anywhere in a step's tensors.
POINTERS = frozenset({
    "positions_ptr", "slot_mapping_ptr", "tables_ptr", "query_start_loc_ptr", "seq_lens_ptr", "tree_mask_ptr",
    "key_start_loc_ptr", "key_lens_ptr", "first_ptr", "lens_ptr", "starts_ptr", "token_ids_ptr", "slots_ptr",
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "masks_ptr", "marks_ptr", "scores_ptr",
    "paths_ptr", "last_ptr", "drafts_ptr", "words_ptr", "depths_ptr", "size_ptr", "arrived_ptr", "pending_ptr",
    "drawn_ptr",
})  # fmt: skip


def step_kernel(function: Callable[..., None]) -> Any:
    """The kernel, compiled once for all values of such arguments."""
    names = inspect.signature(function).parameters
    return triton.jit(
        function,
        do_not_specialize=sorted(INTEGERS.intersection(names)),
        do_not_specialize_on_alignment=sorted(POINTERS.intersection(names)),
    )


def two_tensors(*size: int, device: torch.device) -> list[torch.Tensor]:
    """fp32, not halves of one: the second half would begin where 16 bytes do or not, with the number of rows, and a
    kernel that takes it be compiled for both."""
    return [torch.empty(size, dtype=torch.float32, device=device) for _ in range(2)]
