// Hopper's warpgroup product of latent attention: d[64 x 256] += a[64 x 16] b[16 x 256] in bf16, or of 128 columns, b's rows
// being the summed dimension (columns_operand of hopper_mma.cuh). Accumulators as in hopper_mma.cuh. Device code only.
#pragma once

#include <cstdint>

#include "mma/wgmma_lists.h"

namespace slipstream {

#define SLIPSTREAM_OUTPUTS SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS32(32), SLIPSTREAM_SUMS32(64), SLIPSTREAM_SUMS32(96)

// a: in registers, as two accumulator columns packed.
__device__ __forceinline__ void multiply_values(float (&d)[128], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SLIPSTREAM_LIST128
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
               : SLIPSTREAM_OUTPUTS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// a: in shared memory (rows_operand).
__device__ __forceinline__ void multiply_values(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SLIPSTREAM_LIST128
               "}, %128, %129, 1, 1, 1, 0, 1;\n"
               : SLIPSTREAM_OUTPUTS : "l"(a), "l"(b));
}

#undef SLIPSTREAM_OUTPUTS
#define SLIPSTREAM_OUTPUTS SLIPSTREAM_SUMS32(0), SLIPSTREAM_SUMS32(32)

// 128 columns: a kernel of 512 threads has no registers for an instruction with 256.
__device__ __forceinline__ void multiply_values(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SLIPSTREAM_LIST64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : SLIPSTREAM_OUTPUTS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void multiply_values(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SLIPSTREAM_LIST64
               "}, %64, %65, 1, 1, 1, 0, 1;\n"
               : SLIPSTREAM_OUTPUTS : "l"(a), "l"(b));
}

#undef SLIPSTREAM_OUTPUTS

}  // namespace slipstream
