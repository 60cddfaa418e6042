// Wide stores of wgmma's accumulators: of 8 neighbouring columns a quad's lane holds two.
#pragma once

#include <cstdint>

namespace slipstream {

// Lane l's word j changes places with lane j's word l: each lane ends with 16 neighbouring bytes.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool is_upper = threadIdx.x & bit;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const uint32_t received = __shfl_xor_sync(~0u, is_upper ? words[j] : words[j + bit], bit);
      if (is_upper) words[j] = received;
      else words[j + bit] = received;
    }
  }
}

// A row's outputs (of two, r) times `factor` to `to`, its first column, as T; all lanes take part. COLUMNS: of those that
// it has, how many are stored, in eights.
template <int COLUMNS, typename T, int N>
__device__ __forceinline__ void store_row(T* to, bool is_row, const float (&out)[N], int r, float factor) {
#pragma unroll
  for (int first = 0; first < COLUMNS / 8; first += 4) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * (first + j) + 2 * r;
      words[j] = pack<T>(out[i] * factor, out[i + 1] * factor);
    }
    transpose_in_quad(words);
    if (is_row && (COLUMNS % 32 == 0 || 8 * (first + static_cast<int>(threadIdx.x % 4)) < COLUMNS)) {
      *reinterpret_cast<uint4*>(to + 8 * (first + threadIdx.x % 4)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace slipstream
