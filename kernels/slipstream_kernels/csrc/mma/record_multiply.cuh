// The multiplying warpgroups of experts' records: a lane's codes become e4m3 operands in its registers (a nibble in the low
// bits is code / 512, exactly), half a block of them while the products of the half before are under way. Sums of a block
// leave the tensor cores for fp32 registers, where its scales are applied. Zero points meet the totals of activations in
// an fp16 product of their own, once in eight blocks.
#pragma once

#include "mma/hopper_mma.cuh"
#include "formats/int4_codec.cuh"
#include "schedule/record_shape.cuh"
#include "mma/wgmma_fragments.cuh"

namespace slipstream {

template <typename SHAPE>
struct RecordMultiplier {
  static constexpr int kSums = SHAPE::kSums, kColumns = SHAPE::kColumns, kOwn = SHAPE::kOwnBlocks;
  RecordMemory<SHAPE> memory;
  int blocks, warpgroup_m, warpgroup_k;
  RingPlace<SHAPE::kStages> place;
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  uint32_t a[2][8];   // operands of either half of a block: of two products each
  float parts[kSums];
  uint4 raw[2];
  uint32_t words[2];   // of rows l / 4 and l / 4 + 8
  uint32_t zeros[2];   // of eight blocks, as an operand

  // strips: of the pass.
  __device__ __forceinline__ void multiply_pass(int strips, float (&sums)[kSums]) {
    const int stages = (blocks + SHAPE::kBlocks - 1) / SHAPE::kBlocks;
    if (4 * warpgroup_m >= strips) return skip(stages);
    zeros[0] = zeros[1] = 0;
    wait_barrier(memory.full(place.stage), place.parity);
    if (own_blocks(0) > 0) load(place.stage, 0), expand(0);
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
      if ((stage + 1) * SHAPE::kBlocks % 8 == 0 || stage + 1 == stages) multiply_totals(sums);
      release();
    }
  }

 private:
  __device__ __forceinline__ int own_blocks(int stage) const {
    const int left = blocks - stage * SHAPE::kBlocks;
    return kOwn == 2 ? max(0, min(2, left)) : left > warpgroup_k;
  }

  __device__ __forceinline__ void skip(int stages) {
    for (; stages > 0; --stages) wait_barrier(memory.full(place.stage), place.parity), release();
  }

  __device__ __forceinline__ void wait_next() const {
    RingPlace<SHAPE::kStages> next = place;
    next.advance();
    wait_barrier(memory.full(next.stage), next.parity);
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane == 0) arrive(memory.empty(place.stage));
    place.advance();
  }

  // The warp's codes of a block, and its rows' words of scale and zero point.
  __device__ __forceinline__ void load(int stage, int own) {
    const uint32_t record = memory.records(stage) + (warpgroup_k + own) * SHAPE::kBlockBytes +
                            (4 * warpgroup_m + warp) * SHAPE::kRecordBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw[i] = load_shared_16(record + 512 * i + 16 * lane);
      words[i] = load_shared_4(record + SHAPE::kCodeBytes + (lane / 4 + 8 * i) * 4);
    }
  }

  __device__ __forceinline__ void expand(int half) {
    split(raw[half].x, a[half][0], a[half][2]), split(raw[half].y, a[half][1], a[half][3]);
    split(raw[half].z, a[half][4], a[half][6]), split(raw[half].w, a[half][5], a[half][7]);
  }

  static __device__ __forceinline__ void split(uint32_t word, uint32_t& low, uint32_t& high) {
    low = word & 0x0F0F0F0Fu, high = word >> 4 & 0x0F0F0F0Fu;
  }

  // The products of the stage's own block OWN. is_end: the next is in the next stage.
  template <int OWN>
  __device__ __forceinline__ void multiply(int stage, bool has_next, bool is_end, float (&sums)[kSums]) {
    const uint64_t b = rows_operand(memory.rows(place.stage) + (warpgroup_k + OWN) * SHAPE::kRowBytes);
    const float scales[2] = {scale_of(words[0]), scale_of(words[1])};
    keep_zeros((stage * SHAPE::kBlocks + warpgroup_k + OWN) % 8);
    multiply_half(0, b);
    pin_raw();
    expand(1);
    multiply_half(1, b);
    if (has_next) {
      RingPlace<SHAPE::kStages> next = place;
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

  // Operands are made after what is written before.
  __device__ __forceinline__ void pin_raw() {
#pragma unroll
    for (auto& v : raw) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
  }

  // -scale * zero of rows l / 4 and l / 4 + 8, of the lane that has the block's column of the operand.
  __device__ __forceinline__ void keep_zeros(int column) {
    const uint32_t scale = __byte_perm(words[0], words[1], 0x5410), zero = __byte_perm(words[0], words[1], 0x7632);
    uint32_t both;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(scale), "r"(zero));
    const bool is_mine = lane % 4 == column / 2;
    const uint32_t upper = !is_mine ? 0x3210 : column % 2 == 0 ? 0x3254 : 0x5410;
    const uint32_t lower = !is_mine ? 0x3210 : column % 2 == 0 ? 0x3276 : 0x7610;
    zeros[0] = __byte_perm(zeros[0], both, upper), zeros[1] = __byte_perm(zeros[1], both, lower);
  }

  // Adds what zero points make of eight blocks' totals: fp16, and what that leaves of them.
  __device__ __forceinline__ void multiply_totals(float (&sums)[kSums]) {
    uint32_t both[4] = {zeros[0], zeros[1], zeros[0], zeros[1]};
    pin(both), pin(sums);
    begin_products();
    multiply_fragment<__half, kColumns>(sums, both, core_matrices(memory.totals(place.stage), 16 * kColumns), 1);
    commit_products();
    wait_for_products<0>();
    pin(sums), pin(both);
    zeros[0] = zeros[1] = 0;
  }
};

}  // namespace slipstream
