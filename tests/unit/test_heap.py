"""What glibc's heap keeps of freed memory is given back, and no more often than the process grows."""

from __future__ import annotations

import subprocess
import sys

from slipstream.engine.heap import HeapTrimmer

HOLES = """
import ctypes
from slipstream.engine.heap import HeapTrimmer, resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
heap, before, freed = HeapTrimmer(64 << 20), resident_bytes(), []
for _ in range(2000):
    freed.append(libc.malloc(100_000))  # below the size that glibc maps by itself
    ctypes.memset(freed[-1], 1, 100_000)
    libc.malloc(1000)  # stays
for block in freed:
    libc.free(block)
held = resident_bytes() - before
heap.check()
print(held >> 20, resident_bytes() - before >> 20)
"""


def test_holes_of_the_heap_are_given_back() -> None:
    printed = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True).stdout
    held, left = map(int, printed.split())
    assert held > 150 and left < 50, printed


def test_it_is_trimmed_once_per_growth() -> None:
    sizes = iter([100, 109, 111, 105, 114, 90, 101, 95])
    trims: list[int] = []
    heap = HeapTrimmer(10, lambda: next(sizes), lambda: trims.append(1))
    counts = []
    for _ in range(5):
        heap.check()
        counts.append(len(trims))
    # 109; 111, trimmed to 105; 114; 90, which is the least from then on; 101, trimmed to 95
    assert counts == [0, 1, 1, 1, 2]
