// The products of some output features of an expert by a tile of its rows, with MXFP4 weights, by warpgroups: for more rows
// than grouped_mxfp4_multiply.cuh, each of whose warps expands its weights again for every 16 rows.
//
// A lane expands the codes of its two rows of 16 output features to operands in its registers, one product while the one
// before is under way. Rows of x lie in shared memory, as the tensor cores read them.
#pragma once

#include "mma/grouped_mxfp4_multiply.cuh"
#include "mma/hopper_mma.cuh"
#include "mma/wgmma_fragments.cuh"
#include "pipeline/grouped_mxfp4_wide_load.cuh"

namespace slipstream {

// A lane's codes and scales of a unit: of rows l / 4 and + 8 of the warp's 16 output features.
struct Mxfp4WideWeights {
  uint32_t codes[4], scales[1];

  __device__ __forceinline__ void load(uint32_t codes_of_lane, uint32_t scales_of_lane) {
    const uint4 raw = load_shared_16(codes_of_lane);
    codes[0] = raw.x, codes[1] = raw.y, codes[2] = raw.z, codes[3] = raw.w;
    scales[0] = load_shared_4(scales_of_lane);
  }

  __device__ __forceinline__ void pin() { slipstream::pin(codes), slipstream::pin(scales); }

  // Operands of the two products of a half of the unit.
  __device__ __forceinline__ void expand(int tile, int word, uint32_t (&a)[8]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t pairs[4];
      expand_e2m1(codes[2 * row + word], mxfp4_factor(scales[0], 2 * tile + row), pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[2 * i + row] = pairs[i];
    }
  }
};

template <typename SHAPE>
struct Mxfp4WideConsumer {
  static constexpr int kSums = SHAPE::kSums;
  using Unit = typename SHAPE::Unit;
  const GroupedGemmParams& p;
  GroupedMxfp4WideMemory<SHAPE> memory;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // sums = products of the thread's output features, times 2^-32.
  __device__ __forceinline__ void multiply(float (&sums)[kSums]) {
    const int units = Unit::count(p.in_features), tile = warp % 2;
    const uint32_t block = memory.block(0, warp / 2), codes = block + 512 * tile + 16 * lane;
    const uint32_t scales = block + Unit::kScaleOffset + 4 * (lane / 2);
    PipelineState<SHAPE::kStages> state;
    int before = -1;   // the stage that the products under way may still read
    uint32_t a[2][8];
#pragma unroll 1
    for (int first = 0; first < units; first += SHAPE::kStageUnits) {
      // Known to be the same for all lanes: descriptors are made by the uniform unit.
      const uint64_t rows = rows_operand(__shfl_sync(~0u, memory.rows(state.stage, 0), 0));
      const uint32_t offset = state.stage * SHAPE::kWeightBytes;
      wait_barrier(memory.full(state.stage), state.parity);
      Mxfp4WideWeights weights, next;
      weights.load(codes + offset, scales + offset);
#pragma unroll
      for (int unit = 0; unit < SHAPE::kStageUnits; ++unit) {
        if (unit > 0 && first + unit >= units) break;
        if (unit + 1 < SHAPE::kStageUnits) {   // behind the end it is what was there before, and not used
          const uint32_t of_next = offset + (unit + 1) * Unit::kBytes;
          next.load(codes + of_next, scales + of_next);
        }
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          wait_for_products<1>();   // those that read a[word]
          weights.pin();
          if (unit == 0 && word == 1 && before >= 0) release(before);
          weights.expand(tile, word, a[word]);
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
    if (lane == 0) arrive(memory.empty(stage));
  }

  static __device__ __forceinline__ void multiply_word(uint64_t rows, const uint32_t (&a)[8], bool adds, float (&sums)[kSums]) {
    begin_products();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      multiply_fragment<__nv_bfloat16, SHAPE::kTileRows>(sums, a + 4 * step, rows + 2 * step, adds || step > 0);
    }
    commit_products();
  }
};

// Writes the tile's rows, which take the place of weights and rows of x in shared memory.
template <typename SHAPE>
__device__ __forceinline__ void write_mxfp4_rows(const GroupedGemmParams& p, const TokenTile& tile, int first_feature,
                                                 uint32_t shared, const float (&sums)[SHAPE::kSums]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  sync_threads(1, SHAPE::kConsumers);
#pragma unroll
  for (int i = 0; i < SHAPE::kSums; i += 2) {
    const int feature = 16 * warp + lane / 4 + 8 * (i / 2 % 2), row = 8 * (i / 4) + 2 * (lane % 4);
    const uint32_t pair = pack<__nv_bfloat16>(sums[i] * kMxfp4Unit, sums[i + 1] * kMxfp4Unit);
    const uint32_t to = shared + row * SHAPE::kSumStride + 2 * feature;
    store_shared_2(to, pair);
    store_shared_2(to + SHAPE::kSumStride, pair >> 16);
  }
  sync_threads(1, SHAPE::kConsumers);
  constexpr int kChunks = SHAPE::kFeatures / 8;
  for (int item = threadIdx.x; item < tile.num_rows * kChunks; item += SHAPE::kConsumers) {
    const int row = item / kChunks, feature = item % kChunks * 8;
    if (first_feature + feature >= p.out_features) continue;
    const int64_t place = static_cast<int64_t>(tile.first_row + row) * p.out_features + first_feature + feature;
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + place) =
        load_shared_16(shared + row * SHAPE::kSumStride + 2 * feature);
  }
}

// One CTA: some output features by a tile of tokens; a tile that no expert has is left alone. memory: kTotalBytes.
template <typename SHAPE>
__device__ __forceinline__ void multiply_grouped_mxfp4_wide(const GroupedGemmParams& p, int feature_tile, int token_tile,
                                                            char* memory) {
  const TokenTile tile = find_token_tile(p, SHAPE::kTileRows, token_tile);
  if (tile.num_rows == 0) return;
  const GroupedMxfp4WideMemory<SHAPE> of_cta{shared_address(memory)};
  const int first_feature = feature_tile * SHAPE::kFeatures;
  if (threadIdx.x < SHAPE::kStages) {
    init_barrier(of_cta.full(threadIdx.x), 1);
    init_barrier(of_cta.empty(threadIdx.x), SHAPE::kConsumers / 32);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= SHAPE::kConsumers) {
    if (threadIdx.x == SHAPE::kConsumers) copy_mxfp4_stages<SHAPE>(p, tile.expert, token_tile, first_feature, of_cta);
    return;
  }
  float sums[SHAPE::kSums];
  Mxfp4WideConsumer<SHAPE>{p, of_cta}.multiply(sums);
  write_mxfp4_rows<SHAPE>(p, tile, first_feature, of_cta.base, sums);
}

}  // namespace slipstream
