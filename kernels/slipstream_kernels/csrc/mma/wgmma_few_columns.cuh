// The warpgroup products of wgmma_shared.cuh in bf16 for 16, 24 or 32 columns.  Device code only; no framework header.
#pragma once

#include "mma/wgmma_shared.cuh"

namespace slipstream {

#define SLIPSTREAM_PRODUCT_24(TRANSPOSED)                                                                          \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %14, 0;\nwgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16" \
               " {" SLIPSTREAM_LIST8 ", %8, %9, %10, %11}, %12, %13, add, 1, 1, " TRANSPOSED ", 0;}\n"             \
               : SLIPSTREAM_SUMS8(0), SLIPSTREAM_SUMS4(8) : "l"(a), "l"(b), "r"(adds))

// d[64 x N] (+)= a[64 x 16] b[N x 16]^T.  adds 0: d is overwritten.
template <int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  if constexpr (N == 24) SLIPSTREAM_PRODUCT_24("0");
  else multiply_shared<__nv_bfloat16, N>(d, a, b, adds);
}

// d[64 x N] += a^T b^T: a [16 x 64], b [N x 16].
template <int N>
__device__ __forceinline__ void multiply_columns(float (&d)[N / 2], uint64_t a, uint64_t b) {
  if constexpr (N == 24) {
    constexpr int adds = 1;
    SLIPSTREAM_PRODUCT_24("1");
  } else {
    multiply_slab<N>(d, a, b);
  }
}

#undef SLIPSTREAM_PRODUCT_24

}  // namespace slipstream
