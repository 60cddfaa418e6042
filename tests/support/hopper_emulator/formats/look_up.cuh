// The emulator's look_up.cuh: the entries by what they are.
#pragma once

#include "emulator.h"

namespace slipstream {

inline void look_up(uint32_t word, const uint4& table, uint32_t& low, uint32_t& high) {
  uint8_t entries[16];
  std::memcpy(entries, &table, 16);
  low = high = 0;
  for (int i = 0; i < 4; ++i) {
    low |= static_cast<uint32_t>(entries[word >> 4 * i & 15]) << 8 * i;
    high |= static_cast<uint32_t>(entries[word >> 4 * (i + 4) & 15]) << 8 * i;
  }
}

}  // namespace slipstream
