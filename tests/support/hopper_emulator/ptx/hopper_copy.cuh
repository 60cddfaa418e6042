// The emulator's hopper_copy.cuh: memory barriers, named barriers, a place in a ring.
#pragma once

#include "emulator.h"

namespace slipstream {

inline void init_barrier(uint32_t barrier, int arrivals) {
  const auto count = static_cast<uint8_t>(arrivals);
  emulator::memory_barrier(barrier) = {count, count, 0, 0, 0};
}
inline void publish_barriers() {}

inline void arrive(uint32_t address) {
  auto& barrier = emulator::memory_barrier(address);
  if (barrier.pending == 0) emulator::fail("an arrival too many");
  --barrier.pending;
  emulator::settle(barrier);
}

inline void arrive_expecting(uint32_t address, int bytes) {
  emulator::memory_barrier(address).bytes += bytes;
  arrive(address);
}

inline void wait_barrier(uint32_t address, uint32_t parity) {
  const auto& barrier = emulator::memory_barrier(address);
  emulator::until([&] { return barrier.phase != parity; });
}

// What is there before is lost at once, as it may be: who still reads it will see NaN.
inline void copy_bytes(uint32_t to, const void* from, uint32_t barrier, int bytes) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes <= 0 || bytes % 16 != 0) {
    emulator::fail("a copy that is not of whole 16 bytes");
  }
  std::memset(emulator::shared(to), 0xff, bytes);
  emulator::current->cta->copies.push_back(
      {emulator::shared(to), static_cast<const char*>(from), static_cast<uint32_t>(bytes), barrier});
}

inline void fence_shared_for_engines() {}
template <int REGISTERS>
void raise_registers() {}
template <int REGISTERS>
void lower_registers() {}

inline void sync_threads(int id, int num_threads) { emulator::sync(id, num_threads); }

inline void arrive_threads(int id, int num_threads) { emulator::arrive_at(id, num_threads); }

template <int STAGES>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

}  // namespace slipstream
