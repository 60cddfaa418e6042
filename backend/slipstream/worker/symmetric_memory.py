"""Sums of tensors over the GPUs of one host, which read and write each other's memory.

By our own kernel (slipstream_kernels/comm) up to some size, above by PyTorch's. Over PyTorch's symmetric memory, a
private module that only this file knows. Engine thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from slipstream_kernels.comm.cuda import rank_sum
from slipstream_kernels.comm.cuda.rank_sum import RankSum
from slipstream_kernels.comm.cuda.rank_sum import Way as OwnWay
from torch import Tensor

logger = logging.getLogger(__name__)

# Bytes of a tensor up to which each way is the fastest, by number of ranks; above all of them it is NCCL's. Measured
# with two and four (docs/measurements/several-gpus.md).
OWN_WAYS = {
    2: (OwnWay(1 << 20), OwnWay(1 << 21, in_parts=True)),
    3: (OwnWay(1 << 17), OwnWay(1 << 20, in_parts=True)),
    4: (OwnWay(1 << 17), OwnWay(1 << 20, in_parts=True)),
}
OWN_WAYS_BEYOND = (OwnWay(1 << 16),)
# The same where NVLink joins all ranks' GPUs. With two measured; with three and four only whole lines took the place of
# halves, at the same sizes, and of PyTorch's kernel up to 4 MiB.
_LINKED_FEW = (OwnWay(1 << 17, is_wide=True), OwnWay(1 << 22, is_wide=True, in_parts=True))
LINKED_WAYS = {
    2: (OwnWay(1 << 22, is_wide=True), OwnWay(1 << 24, is_wide=True, in_parts=True)),
    3: _LINKED_FEW,
    4: _LINKED_FEW,
}
ONE_SHOT_BYTES = {2: 1 << 19, 3: 1 << 19, 4: 1 << 19}  # each rank reads what all others have; without our kernel
ONE_SHOT_BYTES_BEYOND = 1 << 18
TWO_SHOT_BYTES = 1 << 24  # each rank sums a part, which the others read
_ALIGNMENT = 16  # bytes that a thread loads
# A second group of one process has the first one's name, by which PyTorch looks for its ranks where the first had met,
# for ever.
_has_met = False

Way = Callable[[Tensor], Tensor]


class SymmetricSum:
    """Memory that every rank can read and write, after all of them have called `connect` at once."""

    def __init__(self, rank: int, num_ranks: int, is_linked: bool, dtype: torch.dtype, device: torch.device) -> None:
        """is_linked: whether NVLink joins the GPUs of all ranks."""
        import torch.distributed._symmetric_memory as symmetric

        self._rank, self._num_ranks, self._device = rank, num_ranks, device
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        ways = OWN_WAYS.get(num_ranks, OWN_WAYS_BEYOND)
        self._ways = LINKED_WAYS.get(num_ranks, ways) if is_linked else ways
        self._one_shot_bytes = ONE_SHOT_BYTES.get(num_ranks, ONE_SHOT_BYTES_BEYOND)
        self._buffer: Tensor = symmetric.empty(TWO_SHOT_BYTES // dtype.itemsize, dtype=dtype, device=device)
        mailbox_bytes = rank_sum.mailbox_bytes(num_ranks, self._ways)
        self._mailbox: Tensor = symmetric.empty(mailbox_bytes, dtype=torch.uint8, device=device)
        rank_sum.clear_mailbox(self._mailbox, num_ranks, self._ways)
        torch.cuda.synchronize(device)  # before another rank learns where it is
        self._mailboxes: list[int] = []
        self.own: RankSum | None = None  # our own kernel, if all ranks have it

    def connect(self) -> None:
        import torch.distributed._symmetric_memory as symmetric

        symmetric.rendezvous(self._buffer, self._group)
        found = symmetric.rendezvous(self._mailbox, self._group)
        offset = self._mailbox.data_ptr() - found.buffer_ptrs[self._rank]
        self._mailboxes = [address + offset for address in found.buffer_ptrs]

    def refusal(self) -> str | None:
        """Why this rank cannot run our own kernel. After `connect`."""
        if any(address % rank_sum.LINE_BYTES for address in self._mailboxes):  # a line would come in two parts
            return f"the memory that ranks share does not begin at a multiple of {rank_sum.LINE_BYTES} bytes"
        return rank_sum.refusal(self._device, self._buffer.dtype, self._num_ranks)

    def use_own(self) -> None:
        """After `connect`, by all ranks or by none."""
        self.own = RankSum(self._rank, self._mailboxes, self._ways, self._buffer.dtype, self._device)

    def way_of(self, tensor: Tensor) -> Way | None:
        """What sums such a tensor, of every rank the same; None: NCCL should. Can be captured in a CUDA graph.

        A way takes the rank's part and returns a new tensor."""
        if self.own is not None and self.own.takes(tensor):
            return self.own
        is_whole = tensor.is_contiguous() and tensor.nbytes % _ALIGNMENT == 0 and tensor.data_ptr() % _ALIGNMENT == 0
        if tensor.dtype != self._buffer.dtype or not is_whole or not tensor.nbytes:
            return None
        if tensor.nbytes <= self._one_shot_bytes:
            return self._one_shot
        is_divided = tensor.nbytes % (_ALIGNMENT * self._num_ranks) == 0
        return self._two_shot if is_divided and tensor.nbytes <= TWO_SHOT_BYTES else None

    def _one_shot(self, partial: Tensor) -> Tensor:
        buffer = self._buffer[: partial.numel()].view(partial.shape)
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, partial, "sum", self._group)
        return found

    def _two_shot(self, partial: Tensor) -> Tensor:
        buffer = self._buffer[: partial.numel()].view(partial.shape)
        buffer.copy_(partial)
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self._group)
        return buffer.clone()


def symmetric_sum(
    rank: int, num_ranks: int, dtype: torch.dtype, device: torch.device, all_agree: Callable[[bool], bool]
) -> SymmetricSum | None:
    """None, with a line in the log, where the GPU of any rank cannot read another's memory.

    all_agree: whether all ranks say so. Ranks that chose by themselves would wait for each other in different sums.
    """
    # No sum here needs NVLink's multicast, and setting it up fails where a host's GPUs are lent to several machines.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    global _has_met
    found, reason = None, "this process has had other ranks" if _has_met else "another rank cannot"
    is_linked = all_agree(_is_linked(rank, num_ranks, dtype, device))
    try:
        found = None if _has_met else SymmetricSum(rank, num_ranks, is_linked, dtype, device)
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0]
    is_there = all_agree(found is not None)  # a rank without a buffer would leave the others in `connect`
    if is_there and found is not None:
        _has_met = True
        try:
            found.connect()
        except RuntimeError as error:
            found, reason = None, str(error).splitlines()[0]
        is_there = all_agree(found is not None)
    if not is_there or found is None:
        logger.info("sums over ranks by NCCL only: %s", reason)
        return None
    refusal = found.refusal()
    if all_agree(refusal is None):
        found.use_own()
    else:
        logger.info("small sums over ranks by PyTorch's kernel: %s", refusal or "another rank has not ours")
    return found


def _is_linked(rank: int, num_ranks: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether NVLink joins this rank's GPU to those of all others, its neighbours."""
    if rank_sum.refusal(device, dtype, num_ranks) is not None:
        return False
    first = (device.index or 0) - rank
    return all(rank_sum.are_linked(device, torch.device("cuda", first + other)) for other in range(num_ranks))
