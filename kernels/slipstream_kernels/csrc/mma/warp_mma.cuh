// Warp-level building blocks as thin inline PTX: asynchronous copies, matrix loads, 16x8x16 products.
// Device code only; no framework header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/memory_access.cuh"
#include "formats/numbers.cuh"

namespace slipstream {

// Copies BYTES (4, 8 or 16) to shared memory without passing through registers; 16 bytes bypass L1 and bring their
// whole line of 128 to L2, which made the kernel 2 % faster.
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
  }
}

// The same, or zeros where is_valid is false; `from` is then not read.
template <int BYTES>
__device__ __forceinline__ void copy_async_or_zero(uint32_t to, const void* from, bool is_valid) {
  const int bytes = is_valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's newest groups are still under way.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Matrices of 8 rows x 16 bytes; lane l of each group of 8 names a row, and receives 4 bytes of row l / 4.
// TRANSPOSED: 16-bit units change places, so lane l receives units (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices_x4(uint32_t (&r)[4], uint32_t address) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  }
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices_x2(uint32_t (&r)[4], uint32_t address) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
  }
}

// Transposes an 8x8 matrix of 16-bit units: lane l gives row l / 4, units 2 (l % 4) and the next, and receives the same
// of the transpose.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t unit_pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(unit_pair));
  return transposed;
}

// d[16x8] += a[16x16] b[16x8], fp32 accumulation.  T: __half or __nv_bfloat16.
#define SLIPSTREAM_MMA(TYPES)                                                      \
  asm volatile("mma.sync.aligned.m16n8k16.row.col." TYPES                          \
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"             \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (__is_same(T, __half)) {
    SLIPSTREAM_MMA("f32.f16.f16.f32");
  } else {
    SLIPSTREAM_MMA("f32.bf16.bf16.f32");
  }
}
#undef SLIPSTREAM_MMA

}  // namespace slipstream
