// The adding warps: of each stage, the sum of every token's activations over each group, which zero points are
// multiplied by. Ones times activations by tensor cores: exact in fp32, and a sixth of the instructions of adding them
// up.
#pragma once

#include <cuda_fp8.h>

#include "int4_codec.cuh"
#include "w4a8_stream_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct W4a8Adder {
  W4a8Memory<SHAPE> memory;
  const W4a8Share& share;
  int block;   // of each stage
  int lane = threadIdx.x % 32;

  __device__ __forceinline__ void run() const {
    RingPlace<SHAPE::kStages> place;
#pragma unroll 1
    for (W4a8Walk walk(share); !walk.is_done(); walk.advance(), place.advance()) {
      wait_barrier(memory.filled(place.stage), place.parity);
      if (block < walk.num_blocks()) add_block(place.stage);
      __syncwarp();
      if (lane == 0) arrive(memory.summed(place.stage));
    }
  }

 private:
  __device__ __forceinline__ void add_block(int stage) const {
#pragma unroll 1
    for (int first = 0; first < SHAPE::kColumns; first += 16) {
      float sums[SHAPE::kGroups][4] = {};
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) add_pieces(stage, first, piece, sums);
#pragma unroll
      for (int group = 0; group < SHAPE::kGroups; ++group) {
        const uint32_t to = memory.totals(stage, block, group) + (first + lane / 4) * 4;
        if (lane % 4 == 0) {
          store_shared_4(to, sums[group][0]);
          store_shared_4(to + 32, sums[group][2]);
        }
      }
    }
  }

  // Lane l has the 16-byte pieces 2 (l % 4) + 0, 1 of tokens l / 4 and l / 4 + 8: in which order is all the same.
  __device__ __forceinline__ void add_pieces(int stage, int first, int piece, float (&sums)[SHAPE::kGroups][4]) const {
    const int token = first + lane / 4;
    const uint32_t from = memory.tokens(stage) + block * SHAPE::kTokenBytes + token * 128 +
                          ((lane % 4 * 2 + piece ^ token % 8) << 4);
    const uint4 upper = load_shared_16(from), lower = load_shared_16(from + 8 * 128);
    const uint32_t rows[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
    constexpr uint32_t kOnes = 0x3C003C00u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int half = 0; half < 4; ++half) a[half] = widen(rows[half % 2][i] >> (half / 2 * 16));
#pragma unroll
      for (int group = 0; group < SHAPE::kGroups; ++group) {
        const bool is_in = SHAPE::kGroups == 1 || lane % 4 / 2 == group;
        const uint32_t masked[4] = {is_in ? a[0] : 0, is_in ? a[1] : 0, is_in ? a[2] : 0, is_in ? a[3] : 0};
        multiply_add<__half>(sums[group], masked, kOnes, kOnes);
      }
    }
  }

  static __device__ __forceinline__ uint32_t widen(uint32_t two) {
    const __half2_raw v = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two & 0xffff), __NV_E4M3);
    return uint32_t{v.x} | uint32_t{v.y} << 16;
  }
};

}  // namespace slipstream
