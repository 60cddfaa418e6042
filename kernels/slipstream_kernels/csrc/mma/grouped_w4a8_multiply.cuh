// The consumer warpgroups. A lane's 4-bit values q become e4m3 operands in its registers (q in the low bits is q / 512,
// exactly), half a block while the products of the half before run. Sums of a block leave the tensor cores for fp32
// registers, where its scales are applied. Once in eight blocks an fp16 product adds zero points times activation sums.
#pragma once

#include "mma/hopper_mma.cuh"
#include "formats/int4_converter.cuh"
#include "schedule/grouped_w4a8_shape.cuh"
#include "mma/wgmma_fragments.cuh"

namespace slipstream {

template <typename SHAPE>
struct GroupedW4A8Consumer {
  static constexpr int kSums = SHAPE::kSums, kColumns = SHAPE::kColumns, kOwn = SHAPE::kOwnBlocks;
  GroupedW4A8Memory<SHAPE> memory;
  int blocks, warpgroup_m, warpgroup_k;
  PipelineState<SHAPE::kStages> state;
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  uint32_t a[2][8];   // A operands of the two halves of a block, for two products each
  float parts[kSums];
  uint4 raw[2];
  uint32_t packed_scales[2];   // scale and zero point of rows l / 4 and l / 4 + 8
  uint32_t zeros[2];   // scaled zero points of eight blocks, as an A operand

  // tiles: of the pass.
  __device__ __forceinline__ void multiply_pass(int tiles, float (&sums)[kSums]) {
    const int stages = (blocks + SHAPE::kBlocks - 1) / SHAPE::kBlocks;
    if (4 * warpgroup_m >= tiles) return skip(stages);
    zeros[0] = zeros[1] = 0;
    wait_barrier(memory.full(state.stage), state.parity);
    if (own_blocks(0) > 0) load(state.stage, 0), expand(0);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      const int count = own_blocks(stage);
      const bool has_next = own_blocks(stage + 1) > 0;
      if (kOwn == 2 && count == 2) {
        multiply<0>(stage, true, false, sums);
        multiply<1>(stage, has_next, true, sums);
      } else if (count > 0) {
        multiply<0>(stage, has_next, true, sums);
      }
      if (stage + 1 < stages && !has_next) wait_next();   // else multiply did
      if ((stage + 1) * SHAPE::kBlocks % 8 == 0 || stage + 1 == stages) multiply_activation_sums(sums);
      release();
    }
  }

 private:
  __device__ __forceinline__ int own_blocks(int stage) const {
    const int left = blocks - stage * SHAPE::kBlocks;
    return kOwn == 2 ? max(0, min(2, left)) : left > warpgroup_k;
  }

  __device__ __forceinline__ void skip(int stages) {
    for (; stages > 0; --stages) wait_barrier(memory.full(state.stage), state.parity), release();
  }

  __device__ __forceinline__ void wait_next() const {
    PipelineState<SHAPE::kStages> next = state;
    next.advance();
    wait_barrier(memory.full(next.stage), next.parity);
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane == 0) arrive(memory.empty(state.stage));
    state.advance();
  }

  // Loads the warp's weights of a block, and its rows' scales and zero points.
  __device__ __forceinline__ void load(int stage, int own) {
    const uint32_t tile = memory.weights(stage) + (warpgroup_k + own) * SHAPE::kBlockBytes +
                          (4 * warpgroup_m + warp) * SHAPE::kTileBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw[i] = load_shared_16(tile + 512 * i + 16 * lane);
      packed_scales[i] = load_shared_4(tile + SHAPE::kWeightBytes + (lane / 4 + 8 * i) * 4);
    }
  }

  __device__ __forceinline__ void expand(int half) {
    split(raw[half].x, a[half][0], a[half][2]), split(raw[half].y, a[half][1], a[half][3]);
    split(raw[half].z, a[half][4], a[half][6]), split(raw[half].w, a[half][5], a[half][7]);
  }

  static __device__ __forceinline__ void split(uint32_t word, uint32_t& low, uint32_t& high) {
    low = word & 0x0F0F0F0Fu, high = word >> 4 & 0x0F0F0F0Fu;
  }

  // The products of block OWN of the warpgroup's in a stage. is_end: the warpgroup's next block is in the next stage.
  template <int OWN>
  __device__ __forceinline__ void multiply(int stage, bool has_next, bool is_end, float (&sums)[kSums]) {
    const uint64_t b = rows_operand(memory.rows(state.stage) + (warpgroup_k + OWN) * SHAPE::kRowBytes);
    const float scales[2] = {scale_of(packed_scales[0]), scale_of(packed_scales[1])};
    keep_zeros((stage * SHAPE::kBlocks + warpgroup_k + OWN) % 8);
    multiply_half(0, b);
    pin_raw();
    expand(1);
    multiply_half(1, b);
    if (has_next) {
      PipelineState<SHAPE::kStages> next = state;
      if (is_end) next.advance(), wait_barrier(memory.full(next.stage), next.parity);
      load(next.stage, is_end ? 0 : 1);
      wait_for_products<1>();
      pin_raw();
      expand(0);
    }
    wait_for_products<0>();
    pin(parts);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += scales[i / 2 % 2] * parts[i];
  }

  __device__ __forceinline__ void multiply_half(int half, uint64_t b) {
    begin_products();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      multiply_fragment<__nv_fp8_e4m3, kColumns>(parts, a[half] + 4 * j, b + 4 * half + 2 * j, half + j > 0);
    }
    commit_products();
  }

  // Keeps the compiler from expanding operands before this point.
  __device__ __forceinline__ void pin_raw() {
#pragma unroll
    for (auto& v : raw) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
  }

  // Keeps -scale * zero point of rows l / 4 and l / 4 + 8 in the lane that has the block's column of the A operand.
  __device__ __forceinline__ void keep_zeros(int column) {
    const uint32_t scale = __byte_perm(packed_scales[0], packed_scales[1], 0x5410);
    const uint32_t zero = __byte_perm(packed_scales[0], packed_scales[1], 0x7632);
    uint32_t both;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(scale), "r"(zero));
    const bool is_mine = lane % 4 == column / 2;
    const uint32_t upper = !is_mine ? 0x3210 : column % 2 == 0 ? 0x3254 : 0x5410;
    const uint32_t lower = !is_mine ? 0x3210 : column % 2 == 0 ? 0x3276 : 0x7610;
    zeros[0] = __byte_perm(zeros[0], both, upper), zeros[1] = __byte_perm(zeros[1], both, lower);
  }

  // Adds zero points times activation sums of eight blocks, the sums as fp16 and what rounding leaves of them.
  __device__ __forceinline__ void multiply_activation_sums(float (&sums)[kSums]) {
    uint32_t both[4] = {zeros[0], zeros[1], zeros[0], zeros[1]};
    pin(both), pin(sums);
    begin_products();
    multiply_fragment<__half, kColumns>(sums, both, core_matrices(memory.activation_sums(state.stage), 16 * kColumns), 1);
    commit_products();
    wait_for_products<0>();
    pin(sums), pin(both);
    zeros[0] = zeros[1] = 0;
  }
};

}  // namespace slipstream
