// The emulator's bulk_copy.cuh.
#pragma once

#include "ptx/hopper_copy.cuh"

namespace slipstream {

inline uint64_t evict_first_policy() { return 0; }
inline uint64_t keep_policy() { return 0; }
inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  copy_bytes(to, from, barrier, static_cast<int>(bytes));
}

inline void prefetch_bulk(const void* from, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) emulator::fail("a prefetch that is not aligned");
}

}  // namespace slipstream
