// The consumer warpgroups. A lane's weights become operands in its registers, one phase while the products of the one
// before are under way: no expanded weight goes through shared memory. Sums stay in the tensor cores' registers to the end,
// or leave them a group at a time where the format scales them there (kIsScaledInside).
#pragma once

#include "schedule/mixed_gemm_shape.cuh"
#include "mma/hopper_mma.cuh"
#include "mma/wgmma_fragments.cuh"

namespace slipstream {

template <typename SHAPE>
struct MixedGemmConsumer {
  using Format = typename SHAPE::Format;
  static constexpr int kParts = SHAPE::kParts, kSums = SHAPE::kSums, kPhases = Format::kPhases;
  MixedGemmMemory<SHAPE> memory;
  const MixedGemmWork<SHAPE>& work;
  int warpgroup_m, warpgroup_k;
  PipelineState<SHAPE::kStages> state;
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Format weights;
  uint32_t a[2][8];   // operands of two phases

  // tiles: of the pass.
  __device__ __forceinline__ void multiply_pass(int tiles, float (&sums)[kSums]) {
    const int mine = (work.num_blocks() - warpgroup_k + SHAPE::kWarpgroupsK - 1) / SHAPE::kWarpgroupsK;
    int left = work.num_stages();
    if (4 * warpgroup_m < tiles && mine > 0) left -= multiply_blocks(mine, sums);
    for (; left > 0; --left) await(), release();
  }

 private:
  static constexpr int kOwnBlocks = SHAPE::kBlocks / SHAPE::kWarpgroupsK;   // of a stage

  __device__ __forceinline__ void await() const { wait_barrier(memory.full(state.stage), state.parity); }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane == 0) arrive(memory.empty(state.stage));
    state.advance();
  }

  // Returns how many stages were passed.
  __device__ __forceinline__ int multiply_blocks(int count, float (&sums)[kSums]) {
    int own = 0, stages = 0;   // of the stage's blocks
    await();
    load(state.stage, block_of(0));
    weights.expand(0, a[0]);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool is_last = i + 1 == count, is_end = is_last || own + 1 == kOwnBlocks;
      multiply_block(state.stage, block_of(own), i > 0, sums, [&] {
        if (is_last) return;
        PipelineState<SHAPE::kStages> next = state;
        if (is_end) next.advance(), wait_barrier(memory.full(next.stage), next.parity);
        load(next.stage, block_of(is_end ? 0 : own + 1));
        wait_for_products<1>();
        weights.pin();
        weights.expand(0, a[0]);
      });
      own = is_end ? 0 : own + 1;
      if (is_end) release(), ++stages;
    }
    return stages;
  }

  __device__ __forceinline__ int block_of(int own) const { return warpgroup_k + SHAPE::kWarpgroupsK * own; }

  __device__ __forceinline__ void load(int stage, int block) {
    const int tile = 4 * warpgroup_m + warp;
    weights.load(memory.weights(stage, block, tile), memory.scales(stage, block, tile), lane);
  }

  // sums += the block's products. ahead(): makes the next block's first operands while the last products are under way.
  template <typename AHEAD>
  __device__ __forceinline__ void multiply_block(int stage, int block, bool adds, float (&sums)[kSums],
                                                 const AHEAD& ahead) {
    if constexpr (Format::kIsScaledInside) {
      const typename Format::Scales scales = weights.scales;   // ahead() loads the next block's
#pragma unroll
      for (int group = 0; group < Format::kGroups; ++group) {
        constexpr int kGroupPhases = kPhases / Format::kGroups;
        float parts[kParts];
        multiply_phases<kGroupPhases>(stage, block, group * kGroupPhases, false, parts);
        if (group + 1 == Format::kGroups) ahead();
        wait_for_products<0>();
        pin(parts);
        const uint32_t of_tokens = memory.activation_sums(stage, block) + group * 4 * SHAPE::kSumTokens + lane % 4 * 8;
        if constexpr (SHAPE::kIsInPairs) add_pairs(scales.words[group], of_tokens, parts, sums);
        else add(scales.words[group], of_tokens, parts, sums);
      }
    } else {
      multiply_phases<kPhases>(stage, block, 0, adds, sums);
      ahead();
      wait_for_products<0>();
      pin(sums);
    }
  }

  // to (+)= products of COUNT phases from `first` on; makes operands of the phase behind each, within the block.
  template <int COUNT>
  __device__ __forceinline__ void multiply_phases(int stage, int block, int first, bool adds, float (&to)[kParts]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int phase = first + i;
      begin_products();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int step = 2 * phase + j, slab = step / 4;
        const uint32_t tokens = memory.tokens(stage) + (block * SHAPE::kSlabs + slab) * SHAPE::kColumns * 128;
        const uint64_t b = rows_operand(tokens) + 2 * (step % 4);
        multiply_fragment<typename SHAPE::Operand, SHAPE::kColumns>(to, a[phase % 2] + 4 * j, b, adds || i + j > 0);
      }
      commit_products();
      if (phase + 1 < kPhases) {
        if (phase > 0) wait_for_products<1>();
        weights.pin();
        weights.expand(phase + 1, a[(phase + 1) % 2]);
      }
    }
  }

  // sums += scale * (parts + bias * sums of activations), for rows l / 4 and l / 4 + 8.
  __device__ __forceinline__ void add(const uint32_t (&words)[2], uint32_t activation_sums, const float (&parts)[kParts],
                                      float (&sums)[kSums]) const {
    const RowScale rows[2] = {Format::row_scale(words[0]), Format::row_scale(words[1])};
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const uint2 pair = load_shared_8(activation_sums + 32 * i);
      const float of_tokens[2] = {__uint_as_float(pair.x), __uint_as_float(pair.y)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const RowScale& row = rows[e / 2];
        sums[4 * i + e] += row.scale * (parts[4 * i + e] + row.bias * of_tokens[e % 2]);
      }
    }
  }

  // The same of tokens in two columns, of which the second has 16 times what it stands for. activation_sums: and scales.
  __device__ __forceinline__ void add_pairs(const uint32_t (&words)[2], uint32_t activation_sums, const float (&parts)[kParts],
                                            float (&sums)[kSums]) const {
    const RowScale rows[2] = {Format::row_scale(words[0]), Format::row_scale(words[1])};
#pragma unroll
    for (int i = 0; i < kParts / 4; ++i) {
      const uint2 of_token = load_shared_8(activation_sums + 32 * i);
      const float activation_sum = __uint_as_float(of_token.x), scale = __uint_as_float(of_token.y);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float part = parts[4 * i + 2 * half] + 1.0f / 16 * parts[4 * i + 2 * half + 1];
        sums[i / 2 * 4 + 2 * half + i % 2] += rows[half].scale * scale * (part + rows[half].bias * activation_sum);
      }
    }
  }
};

}  // namespace slipstream
