"""Sums of small tensors over the GPUs of one host, by sm90_rank_sum.cu: one kernel, one trip over NVLink or two."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.cuda.launch import fields, launch
from slipstream_kernels.dependent_launch import launches_dependently

SOURCE = "sm90_rank_sum.cu"
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
MAX_RANKS = 8
PACK_BYTES, LINE_BYTES = 8, 16


class RankSumParams(ctypes.Structure):
    """csrc/params/rank_sum_params.h, field by field."""

    _fields_ = [
        *fields(("partial", "total", "counters")),
        ("mailboxes", ctypes.c_void_p * MAX_RANKS),
        *fields((), ("side_lines", "num_packs", "part"), ("rank", "num_ranks", "is_dependent")),
    ]


def refusal(device: torch.device, dtype: torch.dtype, num_ranks: int) -> str | None:
    """Why this device cannot sum so; None if it can."""
    if (reason := hopper_refusal(device, "ranks are")) is not None:
        return reason
    if dtype not in TYPES or num_ranks > MAX_RANKS:
        return f"{num_ranks} ranks of {dtype}; at most {MAX_RANKS}, of 16 or 32 bits a value, are summed"
    return build_refusal(SOURCE, defines(dtype))


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """The macro that chooses the variant of the kernel."""
    return (f"SLIPSTREAM_TYPE={TYPES[dtype]}",)


def variants() -> list[tuple[str, ...]]:
    """All libraries, for building ahead of time."""
    return [defines(dtype) for dtype in TYPES]


def mailbox_bytes(num_ranks: int, whole_bytes: int, max_bytes: int) -> int:
    """Size of each rank's mailbox. whole_bytes, max_bytes: see RankSum."""
    return 2 * _side_lines(num_ranks, whole_bytes, max_bytes) * LINE_BYTES


def _side_lines(num_ranks: int, whole_bytes: int, max_bytes: int) -> int:
    """Lines of one sum, of whatever size."""
    num_packs = max_bytes // PACK_BYTES
    in_parts = num_ranks * -(-num_packs // num_ranks) + num_packs
    return max(num_ranks * (whole_bytes // PACK_BYTES), in_parts if max_bytes > whole_bytes else 0)


class RankSum:
    """One rank's side of the sums of ranks that all make the same ones in the same order.

    whole_bytes: of the largest tensor that every rank sums whole; above, each sums a part for all, in two trips over
    NVLink, of less. All ranks may lower it between the same two sums."""

    def __init__(
        self,
        rank: int,
        mailboxes: Sequence[int],
        whole_bytes: int,
        max_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """mailboxes: address of each rank's, as `device` sees it: mailbox_bytes, zero before any rank's first sum.
        max_bytes: of the largest tensor.  Raises KernelBuildError where `refusal` gives a reason."""
        self.whole_bytes, self.max_bytes, self._dtype, self._device = whole_bytes, max_bytes, dtype, device
        self._rank, self._mailboxes = rank, (ctypes.c_void_p * MAX_RANKS)(*mailboxes)
        self._num_ranks = len(mailboxes)
        self._side_lines = _side_lines(self._num_ranks, whole_bytes, max_bytes)
        self._counters = torch.zeros(2, dtype=torch.int32, device=device)
        self._library = load(SOURCE, defines(dtype))
        self._is_dependent = launches_dependently(device)

    def takes(self, tensor: torch.Tensor) -> bool:
        is_whole = tensor.is_contiguous() and tensor.nbytes % PACK_BYTES == 0 and tensor.data_ptr() % PACK_BYTES == 0
        return tensor.dtype == self._dtype and 0 < tensor.nbytes <= self.max_bytes and is_whole

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        """A new tensor: the ranks' sum in fp32, in their order, rounded. Waits on the GPU for all ranks.

        Can be captured in a CUDA graph."""
        total, num_packs = torch.empty_like(partial), partial.nbytes // PACK_BYTES
        params = RankSumParams(
            partial=partial.data_ptr(),
            total=total.data_ptr(),
            counters=self._counters.data_ptr(),
            mailboxes=self._mailboxes,
            side_lines=self._side_lines,
            num_packs=num_packs,
            part=0 if partial.nbytes <= self.whole_bytes else -(-num_packs // self._num_ranks),
            rank=self._rank,
            num_ranks=self._num_ranks,
            is_dependent=self._is_dependent,
        )
        launch("rank_sum", self._library, params, self._device)
        return total
