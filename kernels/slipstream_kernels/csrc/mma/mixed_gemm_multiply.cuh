// The consumer warpgroups. A lane's weights become operands in its registers: no expanded weight goes through shared
// memory. Sums stay in the tensor cores' registers to the end, or leave them a group at a time where the format scales them
// there (kIsScaledInside). A warp finishes a block before it begins the next: the others of its scheduler fill its waits.
// What bounds few tokens is how many instructions a block takes, so places in the ring are counted once a stage.
#pragma once

#include "schedule/mixed_gemm_shape.cuh"
#include "mma/hopper_mma.cuh"
#include "mma/mixed_gemm_sums.cuh"
#include "mma/wgmma_fragments.cuh"

namespace slipstream {

// What a lane reads: in the first stage of the ring, of its warpgroup's first block there.
template <typename SHAPE>
struct MixedGemmPlaces {
  using Format = typename SHAPE::Format;
  static constexpr bool kIsByTiles = Format::kOrder == WeightOrder::kTiles;
  // From block to block of a stage.
  static constexpr uint32_t kTokenStep = SHAPE::kSlabs * SHAPE::kColumns * 128;
  static constexpr uint32_t kWeightStep = kIsByTiles ? Format::kTileBytes : SHAPE::kBlockBytes;
  static constexpr uint32_t kScaleStep = kIsByTiles ? SHAPE::kTiles * Format::kScaleBytes : SHAPE::kBlockBytes;
  uint32_t tokens;   // lower half of a descriptor
  uint32_t weights, scales = 0, sums = 0;

  __device__ __forceinline__ MixedGemmPlaces(const MixedGemmMemory<SHAPE>& memory, int warpgroup_m, int warpgroup_k) {
    const int lane = threadIdx.x % 32, tile = 4 * warpgroup_m + threadIdx.x / 32 % 4;
    tokens = static_cast<uint32_t>(rows_operand(memory.tokens(0) + warpgroup_k * kTokenStep));
    weights = memory.weights(0, warpgroup_k, tile) + Format::offset(lane);
    if constexpr (Format::kGroups > 0) scales = memory.scales(0, warpgroup_k, tile) + Format::Scales::offset(lane);
    if constexpr (SHAPE::kIsScaledInside) sums = memory.activation_sums(0, warpgroup_k) + lane % 4 * 8;
  }

  // Known to be the same for all lanes: descriptors are made by the uniform unit.
  __device__ __forceinline__ uint32_t tokens_of(int stage) const {
    return __shfl_sync(~0u, tokens + stage * (SHAPE::kStageBytes / 16), 0);
  }
};

template <typename SHAPE>
struct MixedGemmConsumer {
  using Format = typename SHAPE::Format;
  using Places = MixedGemmPlaces<SHAPE>;
  static constexpr int kParts = SHAPE::kParts, kSums = SHAPE::kSums, kPhases = Format::kPhases;
  static constexpr int kOwnBlocks = SHAPE::kBlocks / SHAPE::kWarpgroupsK;   // of a stage
  static_assert(kOwnBlocks <= 2);
  // Phases of a block that are loaded before its first product: all where registers are left for them.
  static constexpr bool kLoadsAll = Format::kGroups < 2 ? SHAPE::kColumns <= 48 || kPhases == 2 : SHAPE::kColumns <= 16;
  static constexpr int kLoadedAhead = kLoadsAll ? kPhases : kPhases / 2;
  MixedGemmMemory<SHAPE> memory;
  const MixedGemmWork<SHAPE>& work;
  int warpgroup_m, warpgroup_k;
  PipelineState<SHAPE::kStages> state;

  // tiles: of the pass.
  __device__ __forceinline__ void multiply_pass(int tiles, float (&sums)[kSums]) {
    const int mine = (work.num_blocks() - warpgroup_k + SHAPE::kWarpgroupsK - 1) / SHAPE::kWarpgroupsK;
    const Places places(memory, warpgroup_m, warpgroup_k);
    const int count = 4 * warpgroup_m < tiles ? mine : 0;
#pragma unroll 1
    for (int block = 0, stage = 0; stage < work.num_stages(); ++stage, block += kOwnBlocks) {
      const uint32_t tokens = places.tokens_of(state.stage);
      wait_barrier(memory.full(state.stage), state.parity);
      if (block < count) multiply_block<0>(places, tokens, block > 0, sums);
      if (kOwnBlocks > 1 && block + 1 < count) multiply_block<kOwnBlocks - 1>(places, tokens, true, sums);
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(memory.empty(state.stage));
      state.advance();
    }
  }

 private:
  // sums += products of the warpgroup's block OWN of the stage; adds: else they are overwritten, if they stay in the tensor
  // cores' registers. tokens: of the stage.
  template <int OWN>
  __device__ __forceinline__ void multiply_block(const Places& places, uint32_t tokens, bool adds, float (&sums)[kSums]) const {
    const uint32_t start = state.stage * SHAPE::kStageBytes;
    constexpr uint32_t kBlock = SHAPE::kWarpgroupsK * OWN;
    Format weights;
    if constexpr (Format::kGroups > 0) weights.scales.load(places.scales + start + kBlock * Places::kScaleStep);
    const uint32_t from = places.weights + start + kBlock * Places::kWeightStep;
#pragma unroll
    for (int phase = 0; phase < kLoadedAhead; ++phase) weights.load(phase, from, threadIdx.x % 32);
    const uint64_t b = (rows_operand(0) >> 32 << 32) | (tokens + kBlock * Places::kTokenStep / 16);
    if constexpr (SHAPE::kIsScaledInside) {
      constexpr int kGroupPhases = kPhases / Format::kGroups;
#pragma unroll
      for (int group = 0; group < Format::kGroups; ++group) {
        float parts[kParts];
        multiply_phases<kGroupPhases>(weights, from, group * kGroupPhases, b, false, parts);
        const uint32_t from_sums = places.sums + start + kBlock * SHAPE::kActivationSumBytes + group * 4 * SHAPE::kSumTokens;
        GroupTokens<SHAPE> of_tokens;
        if constexpr (kLoadsAll) of_tokens.load(from_sums);
        wait_for_products<0>();
        pin(parts);
        if constexpr (!kLoadsAll) of_tokens.load(from_sums);   // into the registers of the operands
        add_group<SHAPE>(weights.scales.words[group], of_tokens, parts, sums);
      }
    } else {
      multiply_phases<kPhases>(weights, from, 0, b, adds, sums);
      wait_for_products<0>();
      pin(sums);
    }
  }

  // to (+)= products of COUNT phases from `first` on. Operands of two phases are held.
  template <int COUNT>
  __device__ __forceinline__ void multiply_phases(Format& weights, uint32_t from, int first, uint64_t b, bool adds,
                                                  float (&to)[kParts]) const {
    uint32_t operands[2][8];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (i > 1) {
        wait_for_products<1>();
        weights.pin();
      }
      if (first + i >= kLoadedAhead) weights.load(first + i, from, threadIdx.x % 32);
      weights.expand(first + i, operands[i % 2]);
      begin_products();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int step = 2 * (first + i) + j;
        const uint64_t of_step = step / 4 * (SHAPE::kColumns * 128 / 16) + 2 * (step % 4);
        multiply_fragment<typename SHAPE::Operand, SHAPE::kColumns>(to, operands[i % 2] + 4 * j, b + of_step, adds || i + j > 0);
      }
      commit_products();
    }
  }
};

}  // namespace slipstream
