// The products of some output features of an expert by a tile of its rows, with 4-bit weights, by warpgroups: for more rows
// than kernels whose warps expand their weights again for every 16.
//
// A lane expands the codes of its two rows of 16 output features to operands in its registers, one product while the one
// before is under way. Rows of x lie in shared memory, as the tensor cores read them.
#pragma once

#include "mma/hopper_mma.cuh"
#include "mma/wgmma_fragments.cuh"
#include "pipeline/grouped_wide_load.cuh"

namespace slipstream {

template <typename SHAPE>
struct GroupedWideConsumer {
  static constexpr int kSums = SHAPE::kSums;
  using Weights = typename SHAPE::Format::Weights;
  const GroupedGemmParams& p;
  GroupedWideMemory<SHAPE> memory;

  // sums = products of the thread's output features, but for the format's factor.
  __device__ __forceinline__ void multiply(float (&sums)[kSums]) {
    const int units = WideRowPermutation<SHAPE>::count_units(p.in_features);
    PipelineState<SHAPE::kStages> state;
    int before = -1;   // the stage that the products under way may still read
    uint32_t a[2][8];
#pragma unroll 1
    for (int first = 0; first < units; first += SHAPE::kStageUnits) {
      // Known to be the same for all lanes: descriptors are made by the uniform unit.
      const uint64_t rows = rows_operand(__shfl_sync(~0u, memory.rows(state.stage), 0));
      const uint32_t stage = memory.weights(state.stage);
      const int of_stage = min(SHAPE::kStageUnits, units - first);
      wait_barrier(memory.full(state.stage), state.parity);
      Weights weights, next;
      weights.template load<SHAPE::kStageUnits>(p, stage, 0, of_stage);
#pragma unroll
      for (int unit = 0; unit < SHAPE::kStageUnits; ++unit) {
        if (unit > 0 && unit >= of_stage) break;
        // Behind the end it is what was there before, and not used.
        if (unit + 1 < SHAPE::kStageUnits) next.template load<SHAPE::kStageUnits>(p, stage, unit + 1, of_stage);
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          wait_for_products<1>();   // those that read a[word]
          weights.pin();
          if (unit == 0 && word == 1 && before >= 0) release(before);
          expand(weights, word, a[word]);
          multiply_word(rows + unit * (SHAPE::kSlabBytes >> 4) + 4 * word, a[word], first + unit + word > 0, sums);
        }
        weights = next;
      }
      before = state.stage;
      state.advance();
    }
    wait_for_products<0>();
    pin(sums);
  }

 private:
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(memory.empty(stage));
  }

  static __device__ __forceinline__ void expand(const Weights& weights, int word, uint32_t (&a)[8]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t pairs[4];
      weights.expand(word, row, pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[2 * i + row] = pairs[i];
    }
  }

  static __device__ __forceinline__ void multiply_word(uint64_t rows, const uint32_t (&a)[8], bool adds, float (&sums)[kSums]) {
    begin_products();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      multiply_fragment<typename SHAPE::Operand, SHAPE::kTileRows>(sums, a + 4 * step, rows + 2 * step, adds || step > 0);
    }
    commit_products();
  }
};

// Writes the tile's rows, which take the place of weights and rows of x in shared memory.
template <typename SHAPE>
__device__ __forceinline__ void write_wide_rows(const GroupedGemmParams& p, const TokenTile& tile, int first_feature,
                                                uint32_t shared, const float (&sums)[SHAPE::kSums]) {
  using T = typename SHAPE::Operand;
  const int lane = threadIdx.x % 32, feature = 16 * (threadIdx.x / 32) + lane / 4;   // and 8 further
  float factors[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) factors[i] = SHAPE::Format::factor(p, tile.expert, first_feature + feature + 8 * i);
  sync_threads(1, SHAPE::kConsumers);
#pragma unroll
  for (int i = 0; i < SHAPE::kSums; i += 2) {
    const int upper = i / 2 % 2, row = 8 * (i / 4) + 2 * (lane % 4);
    const uint32_t pair = pack<T>(sums[i] * factors[upper], sums[i + 1] * factors[upper]);
    const uint32_t to = shared + row * SHAPE::kSumStride + 2 * (feature + 8 * upper);
    store_shared_2(to, pair);
    store_shared_2(to + SHAPE::kSumStride, pair >> 16);
  }
  sync_threads(1, SHAPE::kConsumers);
  constexpr int kChunks = SHAPE::kFeatures / 8;
  for (int item = threadIdx.x; item < tile.num_rows * kChunks; item += SHAPE::kConsumers) {
    const int row = item / kChunks, of_row = item % kChunks * 8;
    if (first_feature + of_row >= p.out_features) continue;
    const int64_t place = static_cast<int64_t>(tile.first_row + row) * p.out_features + first_feature + of_row;
    *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + place) = load_shared_16(shared + row * SHAPE::kSumStride + 2 * of_row);
  }
}

// One CTA: some output features by a tile of tokens; a tile that no expert has is left alone. memory: kTotalBytes.
template <typename SHAPE>
__device__ __forceinline__ void multiply_grouped_wide(const GroupedGemmParams& p, int feature_tile, int token_tile, char* memory) {
  const TokenTile tile = find_token_tile(p, SHAPE::kTileRows, token_tile);
  if (tile.num_rows == 0) return;
  const GroupedWideMemory<SHAPE> of_cta{shared_address(memory)};
  const int first_feature = feature_tile * SHAPE::kFeatures;
  if (threadIdx.x < SHAPE::kStages) {
    init_barrier(of_cta.full(threadIdx.x), 1);
    init_barrier(of_cta.empty(threadIdx.x), SHAPE::kConsumers / 32);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= SHAPE::kConsumers) {
    if (threadIdx.x == SHAPE::kConsumers) copy_wide_stages<SHAPE>(p, tile.expert, token_tile, first_feature, of_cta);
    return;
  }
  float sums[SHAPE::kSums];
  GroupedWideConsumer<SHAPE>{p, of_cta}.multiply(sums);
  write_wide_rows<SHAPE>(p, tile, first_feature, of_cta.base, sums);
}

}  // namespace slipstream
