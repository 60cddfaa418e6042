// The multiplying warpgroups. A lane's codes become operands in its registers, one phase while the products of the one
// before are under way: no expanded weight goes through shared memory. Sums of a group leave the tensor cores for fp32
// registers, where zero point and scale are applied.
#pragma once

#include "schedule/mixed_gemm_w4a8_shape.cuh"
#include "mma/hopper_mma.cuh"
#include "mma/wgmma_fragments.cuh"

namespace slipstream {

template <typename SHAPE>
struct W4a8Consumer {
  using Codes = typename SHAPE::Codes;
  static constexpr int kSums = SHAPE::kSums, kGroups = SHAPE::kGroups, kPhases = Codes::kPhases;
  static constexpr int kGroupPhases = kPhases / kGroups;
  W4a8Memory<SHAPE> memory;
  const W4a8Share<SHAPE>& share;
  int warpgroup_m, warpgroup_k;
  RingPlace<SHAPE::kStages> place;
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Codes codes;
  uint32_t words[kGroups][2];
  uint32_t a[kPhases][8];   // operands

  // strips: of the pass.
  __device__ __forceinline__ void multiply_pass(int strips, float (&sums)[kSums]) {
    const int blocks = share.num_blocks(), stages = share.num_stages();
    int left = stages;
    if (4 * warpgroup_m < strips) {
      const int mine = (blocks - warpgroup_k + SHAPE::kWarpgroupsK - 1) / SHAPE::kWarpgroupsK;
      if (mine > 0) left -= multiply_blocks(mine, sums);
    }
    for (; left > 0; --left) await(), release();
  }

 private:
  static constexpr int kOwnBlocks = SHAPE::kBlocks / SHAPE::kWarpgroupsK;   // of a stage

  __device__ __forceinline__ void await() const { wait_barrier(memory.full(place.stage), place.parity); }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane == 0) arrive(memory.empty(place.stage));
    place.advance();
  }

  // Returns how many stages were passed.
  __device__ __forceinline__ int multiply_blocks(int count, float (&sums)[kSums]) {
    int own = 0, stages = 0;   // of the stage's blocks
    await();
    load(block_of(0));
    codes.expand(0, a[0]);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int stage = place.stage, block = block_of(own);
      const bool is_last = i + 1 == count, is_end = is_last || own + 1 == kOwnBlocks;
      multiply_block(stage, block, sums, [&] {
        if (is_last) return;
        RingPlace<SHAPE::kStages> next = place;
        if (is_end) next.advance(), wait_barrier(memory.full(next.stage), next.parity);
        load_from(next.stage, block_of(is_end ? 0 : own + 1));
        wait_for_products<1>();
        pin_codes();
        codes.expand(0, a[0]);
      });
      own = is_end ? 0 : own + 1;
      if (is_end) release(), ++stages;
    }
    return stages;
  }

  __device__ __forceinline__ int block_of(int own) const { return warpgroup_k + SHAPE::kWarpgroupsK * own; }
  __device__ __forceinline__ void load(int block) { load_from(place.stage, block); }

  // The warp's codes of a block, and its rows' words of scale and zero point.
  __device__ __forceinline__ void load_from(int stage, int block) {
    const int strip = 4 * warpgroup_m + warp;
    codes.load(memory.codes(stage, block, strip), lane);
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const int row = lane / 4 + 8 * (i % 2);
      words[i / 2][i % 2] = load_shared_4(memory.words(stage, block, strip) + (row * kGroups + i / 2) * 4);
    }
  }

  // sums += the block's products. ahead(): makes the next block's first operands while the last products are under way.
  template <typename AHEAD>
  __device__ __forceinline__ void multiply_block(int stage, int block, float (&sums)[kSums], const AHEAD& ahead) {
    uint32_t now[kGroups][2];   // ahead() loads the next block's
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) now[i / 2][i % 2] = words[i / 2][i % 2];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float parts[kSums];
      multiply_group(stage, block, group, parts);
      if (group + 1 == kGroups) ahead();
      wait_for_products<0>();
      pin(parts);
      add(now[group], memory.totals(stage, block) + group * 4 * SHAPE::kMostTokens, parts, sums);
    }
  }

  __device__ __forceinline__ void multiply_group(int stage, int block, int group, float (&parts)[kSums]) {
    const uint64_t tokens = rows_operand(memory.tokens(stage) + block * SHAPE::kTokenBytes);
#pragma unroll
    for (int i = 0; i < kGroupPhases; ++i) {
      const int phase = group * kGroupPhases + i;
      begin_products();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        multiply_fragment<__nv_fp8_e4m3, SHAPE::kColumns>(parts, a[phase] + 4 * j, tokens + 2 * (2 * phase + j), i + j > 0);
      }
      commit_products();
      if (phase + 1 == kPhases) continue;
      pin_codes();
      codes.expand(phase + 1, a[phase + 1]);
    }
  }

  // Operands are made after the wait that is written before.
  __device__ __forceinline__ void pin_codes() {
#pragma unroll
    for (auto& v : codes.raw) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
  }

  // sums += scale * (parts + bias * totals), for rows l / 4 and l / 4 + 8.
  __device__ __forceinline__ void add(const uint32_t (&of_rows)[2], uint32_t totals, const float (&parts)[kSums],
                                      float (&sums)[kSums]) const {
    const RowScale rows[2] = {Codes::row_scale(of_rows[0]), Codes::row_scale(of_rows[1])};
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const uint2 pair = load_shared_8(totals + 32 * i + lane % 4 * 8);
      const float total[2] = {__uint_as_float(pair.x), __uint_as_float(pair.y)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const RowScale& row = rows[e / 2];
        sums[4 * i + e] += row.scale * (parts[4 * i + e] + row.bias * total[e % 2]);
      }
    }
  }
};

}  // namespace slipstream
