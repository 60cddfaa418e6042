"""Sums of tensors over the GPUs of one host, by sm90_rank_sum.cu: one kernel, one trip over the links or two."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import hopper_refusal
from slipstream_kernels.cuda.launch import fields, launch
from slipstream_kernels.dependent_launch import launches_dependently

SOURCE = "sm90_rank_sum.cu"
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
MAX_RANKS = 8
PACK_BYTES, UNIT_BYTES = 8, 16
LINE_PACKS, LINE_UNITS = 15, 8  # of a wide line of 128 bytes
LINE_BYTES = LINE_UNITS * UNIT_BYTES
WARP = 32


class RankSumParams(ctypes.Structure):
    """csrc/params/rank_sum_params.h, field by field."""

    _fields_ = [
        *fields(("partial", "total", "counters")),
        ("mailboxes", ctypes.c_void_p * MAX_RANKS),
        *fields((), ("side_units", "num_packs", "num_units", "part"), ("rank", "num_ranks", "is_wide", "is_dependent")),
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


@dataclass(frozen=True)
class Way:
    """How tensors of up to `most_bytes` are summed, and more than the way before it takes.

    is_wide: lines of 128 bytes, which NVLink delivers as a whole (are_linked); else of 16.  in_parts: each rank sums a
    part for all, in two trips over the links, of less; else every rank sums all.
    """

    most_bytes: int
    is_wide: bool = False
    in_parts: bool = False

    def units(self, num_bytes: int) -> int:
        """Of 16 bytes, that hold a tensor."""
        packs = num_bytes // PACK_BYTES
        return -(-packs // LINE_PACKS) * LINE_UNITS if self.is_wide else packs

    def part(self, num_bytes: int, num_ranks: int) -> int:
        """Units that a rank sums for all; 0: every rank sums all."""
        return -(-self.units(num_bytes) // (num_ranks * WARP)) * WARP if self.in_parts else 0

    def side_units(self, num_ranks: int) -> int:
        """Units of one side of a mailbox: what a sum of any size takes."""
        part, units = self.part(self.most_bytes, num_ranks), self.units(self.most_bytes)
        return num_ranks * part + units if self.in_parts else num_ranks * units


def are_linked(device: torch.device, other: torch.device) -> bool:
    """Whether NVLink joins two GPUs of this process.  Raises KernelBuildError where `refusal` gives a reason."""
    if device.index == other.index:
        return True
    linked: int = load(SOURCE, defines(torch.float32)).slipstream_are_linked(device.index, other.index)
    return linked == 1


def mailbox_bytes(num_ranks: int, ways: Sequence[Way]) -> int:
    """Size of each rank's mailbox."""
    return 2 * UNIT_BYTES * sum(_sides(num_ranks, ways))


def clear_mailbox(mailbox: torch.Tensor, num_ranks: int, ways: Sequence[Way]) -> None:
    """Fill a mailbox, bytes [mailbox_bytes], with lines that no sum takes for its own.

    Sums of even numbers read side 0 and those of odd ones side 1, so a line that was never written holds a number of
    the other kind.  Zeros alone would be lines of sum 2^32, whose number is 0 again: it comes after days.
    """
    words, first = mailbox.view(torch.int32), 0
    for units in _sides(num_ranks, ways):
        size = units * UNIT_BYTES // words.itemsize
        for side in (0, 1):
            words[first : first + size].fill_(1 - side)
            first += size


def _sides(num_ranks: int, ways: Iterable[Way]) -> tuple[int, int]:
    """Units of a side of the mailbox of short lines and of that of wide ones, behind it."""
    sizes = [(way.is_wide, way.side_units(num_ranks)) for way in ways]
    short, wide = (max((units for is_wide, units in sizes if is_wide == kind), default=0) for kind in (False, True))
    return -(-short // LINE_UNITS) * LINE_UNITS, wide  # lines of 128 bytes begin at a multiple of that


class RankSum:
    """One rank's side of the sums of ranks that all make the same ones in the same order.

    ways: from the smallest tensors to the largest.  All ranks may leave out some between the same two sums."""

    def __init__(
        self, rank: int, mailboxes: Sequence[int], ways: Sequence[Way], dtype: torch.dtype, device: torch.device
    ) -> None:
        """mailboxes: address of each rank's, as `device` sees it, a multiple of LINE_BYTES: mailbox_bytes, cleared by
        clear_mailbox before any rank's first sum.  Raises KernelBuildError where `refusal` gives a reason."""
        self.ways, self._dtype, self._device = tuple(ways), dtype, device
        self._rank, self._num_ranks = rank, len(mailboxes)
        self._sides = _sides(self._num_ranks, ways)
        behind_short = 2 * UNIT_BYTES * self._sides[0]
        addresses = ([address + offset for address in mailboxes] for offset in (0, behind_short))
        self._mailboxes = tuple((ctypes.c_void_p * MAX_RANKS)(*each) for each in addresses)
        self._counters = torch.zeros(2, dtype=torch.int32, device=device)
        self._library = load(SOURCE, defines(dtype))
        self._is_dependent = launches_dependently(device)

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest tensor."""
        return max((way.most_bytes for way in self.ways), default=0)

    def takes(self, tensor: torch.Tensor) -> bool:
        is_whole = tensor.is_contiguous() and tensor.nbytes % PACK_BYTES == 0 and tensor.data_ptr() % PACK_BYTES == 0
        return tensor.dtype == self._dtype and 0 < tensor.nbytes <= self.max_bytes and is_whole

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        """A new tensor: the ranks' sum in fp32, in their order, rounded. Waits on the GPU for all ranks.

        Can be captured in a CUDA graph."""
        total, num_bytes = torch.empty_like(partial), partial.nbytes
        way = next(way for way in self.ways if num_bytes <= way.most_bytes)
        params = RankSumParams(
            partial=partial.data_ptr(),
            total=total.data_ptr(),
            counters=self._counters.data_ptr(),
            mailboxes=self._mailboxes[way.is_wide],
            side_units=self._sides[way.is_wide],
            num_packs=num_bytes // PACK_BYTES,
            num_units=way.units(num_bytes),
            part=way.part(num_bytes, self._num_ranks),
            rank=self._rank,
            num_ranks=self._num_ranks,
            is_dependent=self._is_dependent,
            is_wide=way.is_wide,
        )
        launch("rank_sum", self._library, params, self._device)
        return total
