// The emulator's warp_mma.cuh: what of it the emulated kernels use.
#pragma once

#include <cuda_fp8.h>

#include "formats/numbers.cuh"
#include "ptx/memory_access.cuh"

namespace slipstream {

template <typename T>
const float* table_of_values() {
  static const std::vector<float> values = [] {
    std::vector<float> all(1 << 8 * sizeof(T));
    for (uint32_t bits = 0; bits < all.size(); ++bits) {
      T value;
      std::memcpy(&value, &bits, sizeof(T));   // the lower bytes come first
      all[bits] = to_float(value);
    }
    return all;
  }();
  return values.data();
}

// mma.sync.m16n8k16, row times column. PTX ISA, "Matrix fragments for mma.m16n8k16".
template <typename T>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Given { uint32_t a[4], b[2]; float d[4]; };
  struct Taken { float d[4]; };
  const Given mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  const Taken result = emulator::together<Given, Taken>(mine, [](const Given* given, Taken* taken) {
    const float* values = table_of_values<T>();
    static float rows[16][16], columns[8][16];
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < 2; ++e) {
        for (int r = 0; r < 4; ++r) {
          rows[lane / 4 + r % 2 * 8][lane % 4 * 2 + e + r / 2 * 8] = values[given[lane].a[r] >> 16 * e & 0xffff];
        }
        for (int r = 0; r < 2; ++r) columns[lane / 4][lane % 4 * 2 + e + r * 8] = values[given[lane].b[r] >> 16 * e & 0xffff];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < 4; ++e) {
        float sum = given[lane].d[e];
        for (int k = 0; k < 16; ++k) sum += rows[lane / 4 + e / 2 * 8][k] * columns[lane % 4 * 2 + e % 2][k];
        taken[lane].d[e] = sum;
      }
    }
  });
  for (int e = 0; e < 4; ++e) d[e] = result.d[e];
}

// movmatrix.trans of 8x8 units of 16 bits.
inline uint32_t transpose_8x8(uint32_t pair) {
  return emulator::together<uint32_t, uint32_t>(pair, [](const uint32_t* given, uint32_t* taken) {
    for (int lane = 0; lane < 32; ++lane) {
      taken[lane] = 0;
      for (int e = 0; e < 2; ++e) {
        const int row = lane % 4 * 2 + e, column = lane / 4;
        taken[lane] |= (given[row * 4 + column / 2] >> 16 * (column % 2) & 0xffff) << 16 * e;
      }
    }
  });
}

// Done as late as the thread allows; what is there before is lost at once.
template <int BYTES>
void copy_async_or_zero(uint32_t to, const void* from, bool is_valid) {
  if (to % BYTES != 0 || reinterpret_cast<uintptr_t>(from) % BYTES != 0) emulator::fail("a copy that is not aligned");
  std::memset(emulator::shared(to), 0xff, BYTES);
  const auto* source = is_valid ? static_cast<const char*>(from) : nullptr;
  emulator::current->groups.back().push_back({emulator::shared(to), source, BYTES});
}

template <int BYTES>
void copy_async(uint32_t to, const void* from) {
  copy_async_or_zero<BYTES>(to, from, true);
}

inline void commit_copies() { emulator::current->groups.emplace_back(); }

template <int PENDING>
void wait_for_copies() {
  auto& groups = emulator::current->groups;
  while (groups.size() > PENDING + 1) {
    for (const emulator::OwnCopy& copy : groups.front()) {
      copy.from == nullptr ? std::memset(copy.to, 0, copy.bytes) : std::memcpy(copy.to, copy.from, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

inline void widen_e4m3(uint32_t word, uint32_t& low, uint32_t& high) {
  uint32_t values[4];
  for (int i = 0; i < 4; ++i) {
    values[i] = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(word >> 8 * i), __NV_E4M3).x;
  }
  low = values[0] | values[1] << 16;
  high = values[2] | values[3] << 16;
}

}  // namespace slipstream
