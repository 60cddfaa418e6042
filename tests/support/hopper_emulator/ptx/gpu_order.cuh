// The emulator's gpu_order.cuh: memory is sequentially consistent.
#pragma once

#include "emulator.h"

namespace slipstream {

// A wait for others, who have to go on.
inline int load_acquire(const int* from) {
  emulator::yield();
  return *from;
}
inline void fence_gpu() {}

}  // namespace slipstream
