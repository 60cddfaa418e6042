// 4-bit values to e4m3 by a table of 16 entries in four registers.  Device code only; no framework header.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "formats/look_up.cuh"

namespace slipstream {

// Entries 4 part .. 4 part + 3 of the table of a row and group, round((q - zero point) * scale), part = lane % 4. word:
// fp16 512 * scale, fp16 -zero / 512 above it.
__device__ __forceinline__ uint32_t table_quarter(uint32_t word, int part) {
  const float scale = __half2float(__ushort_as_half(uint16_t(word))) / 512.0f;
  const float first = (4 * part + 512.0f * __half2float(__ushort_as_half(uint16_t(word >> 16)))) * scale;
  const __nv_fp8x2_storage_t low =
      __nv_cvt_float2_to_fp8x2(make_float2(first, first + scale), __NV_SATFINITE, __NV_E4M3);
  const __nv_fp8x2_storage_t high = __nv_cvt_float2_to_fp8x2(
      make_float2(first + 2 * scale, first + 3 * scale), __NV_SATFINITE, __NV_E4M3);
  return uint32_t(low) | uint32_t(high) << 16;
}

// All 16 entries, exchanged among the four lanes of a row.
__device__ __forceinline__ uint4 table_of(uint32_t word) {
  const int lane = threadIdx.x % 32;
  const uint32_t quarter = table_quarter(word, lane % 4);
  const int base = lane & ~3;
  return make_uint4(__shfl_sync(~0u, quarter, base), __shfl_sync(~0u, quarter, base + 1),
                    __shfl_sync(~0u, quarter, base + 2), __shfl_sync(~0u, quarter, base + 3));
}

// The operands of eight codes of a word in the order of w4a8_layout.cuh: of input features 4 (l % 4) on, and 16 further.
__device__ __forceinline__ void look_up_operands(uint32_t word, uint4 const& table, uint32_t& a, uint32_t& further) {
  uint32_t first, last;   // of four pairs, whose halves are 16 input features apart
  look_up(word, table, first, last);
  a = __byte_perm(first, last, 0x6420), further = __byte_perm(first, last, 0x7531);
}

}  // namespace slipstream
