// The producer warps: one copies the weights of a pass as the order of the format allows, and the tokens of a stage by one
// tensor copy; in the ring's first round, which begins while the kernel before still runs, another brings the tokens. A
// small kernel permutes the tokens' features before, where weights are in the order of 16-bit operands (in pairs: split_rows.cuh).
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "pipeline/copy_pace.cuh"
#include "schedule/mixed_gemm_shape.cuh"

namespace slipstream {

// The sum of two 16-bit elements of a word.
template <typename T>
__device__ __forceinline__ float sum_of_pair(uint32_t word) {
  const float2 pair = unpack<T>(word);
  return pair.x + pair.y;
}

// Adds up what the threads of a token's group have, of 32 features each, and stores it where add_group of mixed_gemm_sums.cuh
// reads it: [tile of tokens][group of input features][token of the tile]. All threads of a group are there.
template <typename FORMAT, int COLUMNS>
__device__ __forceinline__ void store_activation_sum(const MixedGemmParams& p, int token, int chunk, float sum) {
  constexpr int kChunks = 4 / FORMAT::kGroups;   // of a group
  const uint32_t threads = ((1u << kChunks) - 1) << (threadIdx.x % 32 / kChunks * kChunks);
#pragma unroll
  for (int distance = 1; distance < kChunks; distance *= 2) sum += __shfl_xor_sync(threads, sum, distance);
  if (chunk % kChunks != 0) return;
  const int64_t group = int64_t{token / COLUMNS} * (p.in_features / (32 * kChunks)) + chunk / kChunks;
  p.activation_sums[group * COLUMNS + token % COLUMNS] = sum;
}

constexpr int kPermuteThreads = 256;   // of a CTA
constexpr int kPermuteFeatures = 32;   // of a thread

// permuted_x[32 i + 8 j + 2 q + h] = x[32 i + 16 h + 4 q + j]: the order in which the nibbles of a word become pairs. A
// thread takes 32 features of a token. Formats that scale sums get the activations' sums, too.
template <typename FORMAT, int COLUMNS>
__device__ __forceinline__ void permute_features(const MixedGemmParams& p) {
  const int chunks = p.in_features / 32, item = blockIdx.x * kPermuteThreads + threadIdx.x, token = item / chunks;
  if (token >= p.num_tokens) return;
  const char* from = static_cast<const char*>(p.x) + token * p.x_row_stride + item % chunks * 64;
  uint4* to = static_cast<uint4*>(p.permuted_x) + int64_t{item} * 4;
  uint32_t words[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = load_global_16(from + 16 * i);
    words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t out[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      out[q] = __byte_perm(words[2 * q + j / 2], words[8 + 2 * q + j / 2], j % 2 ? 0x7632 : 0x5410);
    }
    to[j] = make_uint4(out[0], out[1], out[2], out[3]);
  }
  if constexpr (FORMAT::kIsScaledInside) {
    float sum = 0.0f;
#pragma unroll
    for (const uint32_t word : words) sum += sum_of_pair<typename FORMAT::Operand>(word);
    store_activation_sum<FORMAT, COLUMNS>(p, token, item % chunks, sum);
  }
}

struct MixedGemmMaps {
  CUtensorMap tokens, four_tiles, one_tile;   // the last two: of weights by rows
};

template <typename SHAPE>
struct MixedGemmProducer {
  using Format = typename SHAPE::Format;
  const MixedGemmParams& p;
  const MixedGemmMaps& maps;
  MixedGemmMemory<SHAPE> memory;
  const MixedGemmWork<SHAPE>& work;
  uint64_t policy = weight_policy();
  int lane = threadIdx.x % 32;

  __device__ __forceinline__ void run() const {
    const CopyPace pace(p.copy_pace, memory.empty(0));
    Walk ahead{work};
    for (int stage = 0; stage < SHAPE::kStages && !ahead.is_done(); ++stage, ahead.advance()) {
      // Weights of up to 8 tokens were 0 to 2 % slower so: some of them fill less than half of a ring.
      if constexpr (SHAPE::kColumns > 8) pace.wait(stage * SHAPE::kBlocks * SHAPE::kBlockBytes);
      copy_weights(stage, ahead);
    }
    await_previous();
    PipelineState<SHAPE::kStages> state;
    state.parity = 1;   // the second time around
#pragma unroll 1
    for (; !ahead.is_done(); ahead.advance(), state.advance()) {
      wait_barrier(memory.empty(state.stage), state.parity ^ 1);
      copy_weights(state.stage, ahead);
      copy_tokens(state.stage, ahead);
    }
  }

  __device__ __forceinline__ void run_first_tokens() const {
    await_previous();
    Walk walk{work};
    for (int stage = 0; stage < SHAPE::kStages && !walk.is_done(); ++stage, walk.advance()) copy_tokens(stage, walk);
  }

 private:
  struct Walk {
    const MixedGemmWork<SHAPE>& work;
    int pass = 0, block = work.begin_block, tile = work.pass_begin(0), tiles = work.pass_begin(1) - tile;

    __device__ __forceinline__ bool is_done() const { return pass >= work.num_passes || work.num_blocks() == 0; }
    __device__ __forceinline__ int blocks() const { return min(SHAPE::kBlocks, work.end_block - block); }

    __device__ __forceinline__ void advance() {
      block += SHAPE::kBlocks;
      if (block < work.end_block) return;
      block = work.begin_block, ++pass;
      if (pass < work.num_passes) tile = work.pass_begin(pass), tiles = work.pass_begin(pass + 1) - tile;
    }
  };

  __device__ __forceinline__ uint64_t weight_policy() const {
    if constexpr (!SHAPE::kHasTokenTiles) return evict_first_policy();
    else return p.token_tiles > 1 ? kReadNormally : kReadOnce;   // clusters of other tokens read weights, too
  }

  // Announces the bytes of tokens, too: whole boxes, also beyond the last block.
  __device__ __forceinline__ void copy_weights(int stage, const Walk& walk) const {
    const uint32_t barrier = memory.full(stage);
    if (lane == 0) {
      const uint32_t of_tiles = walk.blocks() * walk.tiles * (Format::kTileBytes + Format::kScaleBytes);
      arrive_expecting(barrier, of_tiles + walk.blocks() * SHAPE::kActivationSumBytes + SHAPE::kBlocks * SHAPE::kTokenBytes);
    }
    __syncwarp();
    if constexpr (Format::kOrder == WeightOrder::kRows) copy_rows(stage, walk, barrier);
    else if constexpr (Format::kOrder == WeightOrder::kBlocks) copy_blocks(stage, walk, barrier);
    else copy_tiles(stage, walk, barrier);
  }

  // One lane for each box of a block, of four tiles or one.
  __device__ __forceinline__ void copy_rows(int stage, const Walk& walk, uint32_t barrier) const {
    const int fours = walk.tiles / 4, ones = walk.tiles % 4, tile = lane < fours ? 4 * lane : 3 * fours + lane;
    if (lane >= fours + ones) return;
    const CUtensorMap* map = lane < fours ? &maps.four_tiles : &maps.one_tile;
#pragma unroll
    for (int i = 0; i < SHAPE::kBlocks; ++i) {
      if (i >= walk.blocks()) break;
      copy_box(memory.weights(stage, i, tile), map, barrier, policy, 128 * (walk.block + i), 0, 0, walk.tile + tile);
    }
  }

  // One lane for each block's tiles, one for each block's scales.
  __device__ __forceinline__ void copy_blocks(int stage, const Walk& walk, uint32_t barrier) const {
    const int tiles = p.out_features / 16, block = lane % SHAPE::kBlocks;
    if (lane >= 2 * SHAPE::kBlocks || block >= walk.blocks()) return;
    if (lane < SHAPE::kBlocks) {
      const int64_t tile = int64_t{walk.block + block} * tiles + walk.tile;
      copy_bulk(memory.weights(stage, block, 0), static_cast<const char*>(p.qweight) + tile * Format::kTileBytes,
                walk.tiles * Format::kTileBytes, barrier, policy);
    } else {
      copy_scales(stage, walk, block, barrier);
    }
  }

  // One lane for each tile's blocks, one for each block's scales.
  __device__ __forceinline__ void copy_tiles(int stage, const Walk& walk, uint32_t barrier) const {
    if (lane < walk.tiles) {
      const int64_t block = int64_t{walk.tile + lane} * (p.in_features / 128) + walk.block;
      copy_bulk(memory.weights(stage, 0, lane), static_cast<const char*>(p.qweight) + block * Format::kTileBytes,
                walk.blocks() * Format::kTileBytes, barrier, policy);
    }
    const int block = lane - SHAPE::kTiles;
    if (block >= 0 && block < walk.blocks()) copy_scales(stage, walk, block, barrier);
  }

  // Copies a block's scales. Scales of whole rows are the same for all blocks.
  __device__ __forceinline__ void copy_scales(int stage, const Walk& walk, int block, uint32_t barrier) const {
    const int64_t tile = int64_t{p.is_channelwise != 0 ? 0 : walk.block + block} * (p.out_features / 16) + walk.tile;
    copy_bulk(memory.scales(stage, block, 0), static_cast<const char*>(p.group_scales) + tile * Format::kScaleBytes,
              walk.tiles * Format::kScaleBytes, barrier, policy);
  }

  __device__ __forceinline__ void copy_tokens(int stage, const Walk& walk) const {
    const uint32_t barrier = memory.full(stage);
    if (lane == 0) {
      copy_box(memory.tokens(stage), &maps.tokens, barrier, kReadOften, 0, work.first_token, walk.block * SHAPE::kSlabs);
    }
    if constexpr (SHAPE::kIsScaledInside) {
      if (lane != 1) return;
      constexpr int kOfBlock = SHAPE::kActivationSumBytes / 4;
      const float* from = p.activation_sums + walk.block * kOfBlock;
      if constexpr (SHAPE::kHasTokenTiles) from += int64_t{work.first_token / SHAPE::kColumns} * (p.in_features / 128) * kOfBlock;
      copy_bulk(memory.activation_sums(stage, 0), from, walk.blocks() * SHAPE::kActivationSumBytes, barrier, keep_policy());
    }
  }
};

}  // namespace slipstream
