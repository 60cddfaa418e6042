"""LoRA adapters of requests, and the slots on the device that they run in. Engine thread; knows no tensors.

A slot is held while requests of its adapter run, and keeps the adapter afterwards until another one needs the slot: the
one that was held the longest time ago goes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of two axes as a client sent it, little endian. item: of array's type codes, or "e"."""

    item: str
    shape: tuple[int, int]
    data: bytes


@dataclass(frozen=True, slots=True)
class SentAdapter:
    """An adapter as TensorRT-LLM's clients send it: its weights with the first request, its id with each.

    weights: a row a module: A [r, in_features], then B [out_features, r] with the scale in it, padded by zeros.
    config: int32, a row a module: (module id, layer, r).
    """

    task_id: int
    weights: Matrix | None = None
    config: Matrix | None = None


@dataclass(frozen=True, eq=False)
class Adapter:
    """number: of this load of it, never used again. pairs: of each module, what the worker reads."""

    name: str
    number: int
    pairs: Mapping[str, Any]
    num_bytes: int = 0
    folder: str = ""

    @property
    def prefix_key(self) -> bytes:
        """What sets keys and values of this adapter apart from those of the model and of others."""
        return b"\0adapter %d" % self.number


class AdapterSlots:
    """Which adapter is in which slot. In a step in which an adapter finds none, no request behind it starts with
    an adapter, so that slots come free for those that wait."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[int, int] = {}  # by adapter number; those held last are last
        self._num_users: dict[int, int] = {}  # of slots that are held
        self._loads: list[tuple[int, Adapter]] = []
        self._is_crowded = False

    def begin_step(self) -> None:
        self._is_crowded = False

    def must_wait(self, adapter: Adapter) -> bool:
        """Whether a request of this adapter cannot start in this step."""
        has_slot = adapter.number in self._slots or self._free or len(self._num_users) < len(self._slots)
        self._is_crowded = self._is_crowded or not has_slot
        return self._is_crowded

    def hold(self, adapter: Adapter) -> int:
        """The slot of an adapter for one more request. It has been asked whether there is one."""
        slot = self._slots.pop(adapter.number, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evicted()
            self._loads.append((slot, adapter))
        self._slots[adapter.number] = slot
        self._num_users[adapter.number] = self._num_users.get(adapter.number, 0) + 1
        return slot

    def release(self, adapter: Adapter) -> None:
        count = self._num_users.pop(adapter.number) - 1
        if count:
            self._num_users[adapter.number] = count

    def take_loads(self) -> list[tuple[int, Adapter]]:
        """Adapters that have to be in their slots before the next step computes."""
        loads, self._loads = self._loads, []
        return loads

    def forget(self) -> None:
        """The worker has lost what was in the slots. No request runs."""
        assert not self._num_users
        self._free += self._slots.values()
        self._slots.clear()
        self._loads.clear()

    def _evicted(self) -> int:
        oldest = next(number for number in self._slots if number not in self._num_users)
        return self._slots.pop(oldest)
