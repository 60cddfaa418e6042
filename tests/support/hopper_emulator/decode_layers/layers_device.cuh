// The emulator's layers_device.cuh.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/hopper_copy.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

inline uint4 load_l2_16(const void* from) { return *static_cast<const uint4*>(from); }
inline uint2 load_l2_8(const void* from) { return *static_cast<const uint2*>(from); }

inline float value_of_e4m3(uint32_t code) {
  const int exponent = static_cast<int>(code >> 3 & 15), fraction = static_cast<int>(code & 7);
  float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                  : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  if ((code & 0x7f) == 0x7f) magnitude = NAN;
  return code & 0x80 ? -magnitude : magnitude;
}

inline void widen_e4m3(uint32_t word, uint32_t& low, uint32_t& high) {
  float values[4];
  for (int i = 0; i < 4; ++i) values[i] = value_of_e4m3(word >> 8 * i & 255);
  low = pack<__half>(values[0], values[1]), high = pack<__half>(values[2], values[3]);
}

// To the nearest, ties to the even code; beyond 448 to 448.
inline uint32_t code_of_e4m3(float value) {
  uint32_t best = 0;
  for (uint32_t code = 1; code < 0x7f; ++code) {
    const float now = std::abs(value_of_e4m3(code) - std::abs(value)), before = std::abs(value_of_e4m3(best) - std::abs(value));
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

inline uint16_t to_e4m3(float low, float high) {
  return static_cast<uint16_t>(code_of_e4m3(low) | code_of_e4m3(high) << 8);
}

inline void prefetch_line(const void*) {}

inline uint32_t warp_most(uint32_t value) {
  for (int distance = 1; distance < 32; distance *= 2) value = std::max(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

inline void fence_device() {}
inline void count_up(uint32_t* counter) { atomicAdd(counter, 1u); }
inline void await_count(const uint32_t* counter, uint32_t count) {
  emulator::until([&] { return *counter >= count; });
}

}  // namespace slipstream
