// The emulator's hopper_mma.cuh: descriptors, products and their groups.
#pragma once

#include "warpgroup.h"

namespace slipstream {

constexpr int kSwizzleBytes = 128;
constexpr int kSwizzleUnit = 8 * kSwizzleBytes;

// As the hardware encodes them, for kernels add to the address.
inline uint64_t rows_operand(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{kSwizzleUnit >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}
inline uint64_t columns_operand(uint32_t address, int stride) {
  return (uint64_t{1} << 62) | (uint64_t{kSwizzleUnit >> 4} << 32) | (static_cast<uint64_t>(stride >> 4) << 16) |
         ((address & 0x3FFFF) >> 4);
}
inline uint64_t narrow_rows_operand(uint32_t address) {
  return (uint64_t{2} << 62) | (uint64_t{kSwizzleUnit >> 5} << 32) | (uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}

template <typename T, bool ADDS, int N>
void multiply_rows(float (&d)[N], uint64_t a, uint64_t b) {
  emulator::multiply<T, 2 * N>(d, nullptr, a, b, false, ADDS);
}
template <typename T, int N>
void multiply_columns(float (&d)[N], const uint32_t* a, uint64_t b) {
  emulator::multiply<T, 2 * N>(d, a, 0, b, true, 1);
}
template <bool ADDS>
void multiply_fp8_values(float (&d)[64], const uint32_t* a, uint64_t b) {
  emulator::multiply<__nv_fp8_e4m3, 128>(d, a, 0, b, false, ADDS);
}

template <typename T, int N>
void pin(T (&)[N]) {}
inline void begin_products() {}
inline void commit_products() { emulator::warpgroup().commit(); }
template <int PENDING>
void wait_for_products() {
  emulator::warpgroup().wait(PENDING);
}

}  // namespace slipstream
