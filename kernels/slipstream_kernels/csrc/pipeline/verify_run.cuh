// What a CTA of the verify kernel does: it streams its tiles of a request's keys and values through a ring in shared memory,
// attends to them with 64 rows, and adds up its sums with those of its cluster.
#pragma once

#include "epilogue/verify_merge.cuh"
#include "mma/draft_mask.cuh"
#include "mma/wgmma_shared.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/hopper_copy.cuh"

namespace slipstream {

template <typename SHAPE>
struct Verifier {
  using T = typename SHAPE::Element;
  using Operand = typename SHAPE::Operand;
  static constexpr int kOutputs = SHAPE::kHeadDim / 2;
  static constexpr int kScores = SHAPE::kKeys / 2;
  // A thread copies the same 16 bytes of every kRowsAtOnce-th row of the cache.
  static constexpr int kRowsAtOnce = SHAPE::kThreads / SHAPE::kCacheChunks;
  static constexpr int kTimes = SHAPE::kKeys / kRowsAtOnce;

  const VerifyParams& p;
  const VerifyWork& work;
  uint32_t memory;          // shared address, aligned to the swizzle
  float scale;              // of raw products, base 2
  RowState state;
  float out[kOutputs];

  __device__ __forceinline__ uint32_t stage(int tile) const {
    return memory + SHAPE::kRingOffset + (tile - work.tile) % SHAPE::kStages * SHAPE::kStageBytes;
  }
  __device__ __forceinline__ uint32_t operands(int tile) const {
    return SHAPE::kIsFp8 ? memory + SHAPE::kOperandOffset : stage(tile);
  }

  // Starts the copies of a tile's keys and values, zeros for slots past the sequence, and commits them; nothing is
  // committed but an empty group past the last tile.
  __device__ __forceinline__ void copy_tile(int tile) const {
    if (tile < work.end_tile) {
      const int chunk = threadIdx.x % SHAPE::kCacheChunks, first = threadIdx.x / SHAPE::kCacheChunks;
      int64_t rows[kTimes];
#pragma unroll
      for (int i = 0; i < kTimes; ++i) rows[i] = row_of(tile * SHAPE::kKeys + first + i * kRowsAtOnce);
      const uint32_t to = stage(tile);
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        const int row = first + i * kRowsAtOnce;
        const uint32_t place = SHAPE::kIsFp8 ? raw_place_of(row, chunk) : place_of(row, chunk);
        const int64_t offset = (rows[i] * SHAPE::kCacheChunks + chunk) * 16;
        const bool is_valid = tile * SHAPE::kKeys + row < work.seq_len;
        copy_async_or_zero<16>(to + place, static_cast<const char*>(p.key_cache) + offset, is_valid);
        copy_async_or_zero<16>(to + SHAPE::kCacheTileBytes + place, static_cast<const char*>(p.value_cache) + offset,
                               is_valid);
      }
    }
    commit_copies();
  }

  // A token's row in the cache.
  __device__ __forceinline__ int64_t row_of(int token) const {
    if (token >= work.seq_len) return 0;
    const int block = p.block_tables[work.request * p.table_stride + (token >> p.block_size_log2)];
    const int64_t head_block = static_cast<int64_t>(max(block, 0)) * p.num_kv_heads + work.kv_head;
    return (head_block << p.block_size_log2) + (token & ((1 << p.block_size_log2) - 1));
  }

  // Address of 16 bytes of an operand's row, under the swizzle.
  static __device__ __forceinline__ uint32_t place_of(int row, int chunk) {
    return chunk / 8 * SHAPE::kSlabBytes + row * kSwizzleBytes + ((chunk ^ row) % 8) * 16;
  }
  static __device__ __forceinline__ uint32_t raw_place_of(int row, int chunk) {
    return (row * SHAPE::kCacheChunks + chunk) * 16;
  }

  // Converts the part of a tile that this thread has copied to operands. All warps have multiplied the tile before.
  __device__ __forceinline__ void convert(int tile) const {
    const int chunk = threadIdx.x % SHAPE::kCacheChunks, first = threadIdx.x / SHAPE::kCacheChunks;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        const int row = first + i * kRowsAtOnce;
        const uint4 raw = load_shared_16(stage(tile) + part * SHAPE::kCacheTileBytes + raw_place_of(row, chunk));
        const uint32_t to = operands(tile) + part * SHAPE::kTileBytes;
        uint32_t half[8];
        widen_e4m3(raw.x, half[0], half[1]);
        widen_e4m3(raw.y, half[2], half[3]);
        widen_e4m3(raw.z, half[4], half[5]);
        widen_e4m3(raw.w, half[6], half[7]);
        store_words(to + place_of(row, 2 * chunk), half[0], half[1], half[2], half[3]);
        store_words(to + place_of(row, 2 * chunk + 1), half[4], half[5], half[6], half[7]);
      }
    }
  }

  __device__ __forceinline__ void copy_queries() const {
    const int chunk = threadIdx.x % SHAPE::kChunks;
    for (int row = threadIdx.x / SHAPE::kChunks; row < SHAPE::kRows; row += SHAPE::kThreads / SHAPE::kChunks) {
      const int token = (work.first_row + row) / p.group, head = (work.first_row + row) % p.group;
      const T* q = static_cast<const T*>(p.q) + (work.start + token) * p.q_token_stride +
                   (work.kv_head * p.group + head) * p.q_head_stride + 8 * chunk;
      const bool is_valid = token < work.query_len;
      copy_async_or_zero<16>(memory + place_of(row, chunk), is_valid ? q : static_cast<const T*>(p.q), is_valid);
    }
    commit_copies();
  }

  static __device__ __forceinline__ void store_words(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    store_shared_16(address, __uint_as_float(x), __uint_as_float(y), __uint_as_float(z), __uint_as_float(w));
  }

  // The 16 bytes of each row that this thread has copied, from bf16.
  __device__ __forceinline__ void convert_queries() const {
    const int chunk = threadIdx.x % SHAPE::kChunks;
    for (int row = threadIdx.x / SHAPE::kChunks; row < SHAPE::kRows; row += SHAPE::kThreads / SHAPE::kChunks) {
      const uint4 old = load_shared_16(memory + place_of(row, chunk));
      const auto halves = [](uint32_t pair) {
        return pack<__half>(__uint_as_float(pair << 16), __uint_as_float(pair & ~0xffffu));
      };
      store_words(memory + place_of(row, chunk), halves(old.x), halves(old.y), halves(old.z), halves(old.w));
    }
  }

  __device__ __forceinline__ void attend() {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    const int64_t* tree_mask = p.tree_mask == nullptr ? nullptr : p.tree_mask + work.start;
    const DraftMask mask(tree_mask, work.query_len, work.first_row, p.group);
    bool is_first = true;
#pragma unroll 1
    for (int tile = work.tile; tile < work.end_tile; ++tile) {
      if (is_first) wait_for_copies<0>();  // the queries came last
      else wait_for_copies<SHAPE::kStages - 1>();
      if constexpr (SHAPE::kIsFp8) {
        if (is_first && !__is_same(T, __half)) convert_queries();
        convert(tile);
        copy_tile(tile + SHAPE::kStages);
      }
      is_first = false;
      fence_shared_for_engines();
      __syncthreads();
      multiply(tile, mask);
      __syncthreads();
      if constexpr (!SHAPE::kIsFp8) copy_tile(tile + SHAPE::kStages);
    }
  }

  __device__ __forceinline__ void multiply(int tile, const DraftMask& mask) {
    float scores[kScores];
    const uint64_t queries = rows_operand(memory), keys = rows_operand(operands(tile));
    pin(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < SHAPE::kHeadDim / 16; ++k) {
      const uint64_t offset = (k / 4 * SHAPE::kSlabBytes + k % 4 * 32) >> 4;
      multiply_shared<Operand, SHAPE::kKeys>(scores, queries + offset, keys + offset, k > 0);
    }
    commit_products();
    wait_for_products<0>();
    pin(scores);
    if ((tile + 1) * SHAPE::kKeys > work.prefix()) mask.hide(tile * SHAPE::kKeys - work.prefix(), scores);
    const float factor[2] = {scale, scale};
    float rescale[2];
    const bool moves = state.follow(scores, factor, rescale);
    uint32_t probs[kScores / 2];
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) probs[i] = pack<Operand>(scores[2 * i], scores[2 * i + 1]);
    if (moves) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] *= rescale[i / 2 % 2];
    }
    multiply_values(tile, probs);
  }

  __device__ __forceinline__ void multiply_values(int tile, uint32_t (&probs)[kScores / 2]) {
    const uint64_t values = columns_operand(operands(tile) + SHAPE::kTileBytes, SHAPE::kSlabBytes);
    pin(out);
    pin(probs);
    begin_products();
#pragma unroll
    for (int k = 0; k < SHAPE::kKeys / 16; ++k) {
      multiply_columns<Operand>(out, probs + 4 * k, values + ((k * 16 * kSwizzleBytes) >> 4));
    }
    commit_products();
    wait_for_products<0>();
    pin(out);
  }
};

template <typename SHAPE>
__device__ __forceinline__ void run_verify_attention(const VerifyParams& p, char* shared) {
  const uint32_t memory = shared_address(shared);
  const int unit = blockIdx.x / p.splits, rank = blockIdx.x % p.splits;
  VerifyWork work;
  if (!work.find<SHAPE::kKeys, SHAPE::kRows>(p, unit, rank)) {  // as all of the cluster
    await_previous();
    return;
  }
  float scale = p.scale * kLog2E;
  if (SHAPE::kIsFp8 && p.key_scale != nullptr) scale *= p.key_scale[work.kv_head];
  Verifier<SHAPE> verifier{p, work, memory, scale};
  int ahead = 0;
  if (p.is_prefix_settled) {
#pragma unroll 1
    for (; ahead < SHAPE::kStages && (work.tile + ahead + 1) * SHAPE::kKeys <= work.prefix(); ++ahead) {
      verifier.copy_tile(work.tile + ahead);
    }
  }
  await_previous();
#pragma unroll 1
  for (; ahead < SHAPE::kStages; ++ahead) verifier.copy_tile(work.tile + ahead);
  verifier.copy_queries();
  verifier.attend();
  VerifyMerge<SHAPE>{p, work, memory, rank, scale}.run(verifier.state, verifier.out);
}

}  // namespace slipstream
