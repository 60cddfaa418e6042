"""Sums of small tensors over the GPUs of one host: one kernel, in which each rank reads what all others have.

Over PyTorch's symmetric memory, a private module that only this file knows. Engine thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

# Up to so many bytes one kernel is faster than NCCL, by number of ranks (published for H100, vLLM pull request 24111).
ONE_SHOT_BYTES = {2: 1 << 20, 3: 1 << 19, 4: 1 << 19}
ONE_SHOT_BYTES_BEYOND = 1 << 18
_ALIGNMENT = 16  # bytes that a thread loads


class SymmetricSum:
    """A buffer of one dtype that every rank can read, after all of them have called `connect` at once."""

    def __init__(self, num_ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._max_bytes = ONE_SHOT_BYTES.get(num_ranks, ONE_SHOT_BYTES_BEYOND)
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._buffer: Tensor = symmetric.empty(self._max_bytes // dtype.itemsize, dtype=dtype, device=device)

    def connect(self) -> None:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.rendezvous(self._buffer, self._group)

    def takes(self, tensor: Tensor) -> bool:
        is_whole = tensor.is_contiguous() and tensor.nbytes % _ALIGNMENT == 0 and tensor.data_ptr() % _ALIGNMENT == 0
        return tensor.dtype == self._buffer.dtype and 0 < tensor.nbytes <= self._max_bytes and is_whole

    def __call__(self, partial: Tensor) -> Tensor:
        """A new tensor: the sum of every rank's, which `takes` has accepted. Can be captured in a CUDA graph."""
        buffer = self._buffer[: partial.numel()].view(partial.shape)
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, partial, "sum", self._group)
        return found


def symmetric_sum(
    num_ranks: int, dtype: torch.dtype, device: torch.device, all_agree: Callable[[bool], bool]
) -> SymmetricSum | None:
    """None, with a line in the log, where the GPU of any rank cannot read another's memory.

    all_agree: whether all ranks say so. Ranks that chose by themselves would wait for each other in different sums.
    """
    # No sum here needs NVLink's multicast, and setting it up fails where a host's GPUs are lent to several machines.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    found, reason = None, "another rank cannot"
    try:
        found = SymmetricSum(num_ranks, dtype, device)
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0]
    is_there = all_agree(found is not None)  # a rank without a buffer would leave the others in `connect`
    if is_there and found is not None:
        try:
            found.connect()
        except RuntimeError as error:
            found, reason = None, str(error).splitlines()[0]
        is_there = all_agree(found is not None)
    if not is_there:
        logger.info("sums over ranks by NCCL only: %s", reason)
    return found if is_there else None
