// The emulator's part_counter.cuh: memory is sequentially consistent.
#pragma once

#include "emulator.h"

namespace slipstream {

inline int count_part(int* counter) { return atomicAdd(counter, 1); }

}  // namespace slipstream
