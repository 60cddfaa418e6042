// Attention of many verify rows (trees of drafts) over a paged KV cache of the queries' type, for Hopper (sm_90a).
// Contract: ops/decode_attention.py, which has this beside the kernel for few rows.
//
// Rows are (token, query head of one kv head) pairs; 64 of them are the tall side of a warpgroup's products, so the keys
// of a tree of 64 tokens are read `group` times and not twice as often. The CTAs of a cluster share the keys of a tile
// and add their sums up in each other's shared memory: nothing goes through global memory in between.
//
// Built once per SLIPSTREAM_TYPE (__half, __nv_bfloat16).

#include <cuda_runtime.h>

#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "hopper_copy.cuh"
#include "kernel_launch.h"
#include "library.h"
#include "prefill_softmax.cuh"
#include "verify_merge.cuh"
#include "wgmma_shared.cuh"

namespace slipstream {

template <typename SHAPE>
struct Verifier {
  using T = typename SHAPE::Element;
  static constexpr int kOutputs = SHAPE::kHeadDim / 2;
  static constexpr int kScores = SHAPE::kKeys / 2;

  const VerifyParams& p;
  const VerifyWork& work;
  uint32_t memory;          // shared address, aligned to the swizzle
  RowState state;
  float out[kOutputs];

  __device__ __forceinline__ uint32_t stage(int tile) const {
    return memory + SHAPE::kRingOffset + (tile - work.tile) % SHAPE::kStages * SHAPE::kStageBytes;
  }

  // Starts the copies of a tile's keys and values, zeros for slots past the sequence, and commits them; nothing is
  // committed but an empty group past the last tile.
  __device__ __forceinline__ void copy_tile(int tile) const {
    if (tile < work.end_tile) {
      const int chunk = threadIdx.x % SHAPE::kChunks, first = threadIdx.x / SHAPE::kChunks;
      constexpr int kTimes = SHAPE::kKeys / SHAPE::kRowsAtOnce;
      int64_t rows[kTimes];
#pragma unroll
      for (int i = 0; i < kTimes; ++i) rows[i] = row_of(tile * SHAPE::kKeys + first + i * SHAPE::kRowsAtOnce);
      const uint32_t to = stage(tile);
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        const int row = first + i * SHAPE::kRowsAtOnce;
        const uint32_t place = place_of(row, chunk);
        const int64_t offset = (rows[i] * SHAPE::kChunks + chunk) * 16;
        const bool is_valid = tile * SHAPE::kKeys + row < work.seq_len;
        copy_async_or_zero<16>(to + place, static_cast<const char*>(p.key_cache) + offset, is_valid);
        copy_async_or_zero<16>(to + SHAPE::kTileBytes + place, static_cast<const char*>(p.value_cache) + offset, is_valid);
      }
    }
    commit_copies();
  }

  // Of a token, its row among all of the cache.
  __device__ __forceinline__ int64_t row_of(int token) const {
    if (token >= work.seq_len) return 0;
    const int block = p.block_tables[work.request * p.table_stride + (token >> p.block_size_log2)];
    const int64_t head_block = static_cast<int64_t>(max(block, 0)) * p.num_kv_heads + work.kv_head;
    return (head_block << p.block_size_log2) + (token & ((1 << p.block_size_log2) - 1));
  }

  // Of 16 bytes of a row of keys, values or queries, under the swizzle.
  static __device__ __forceinline__ uint32_t place_of(int row, int chunk) {
    return chunk / 8 * SHAPE::kSlabBytes + row * kSwizzleBytes + ((chunk ^ row) % 8) * 16;
  }

  __device__ __forceinline__ void copy_queries() const {
    const int chunk = threadIdx.x % SHAPE::kChunks;
    for (int row = threadIdx.x / SHAPE::kChunks; row < SHAPE::kRows; row += SHAPE::kRowsAtOnce) {
      const int token = (work.first_row + row) / p.group, head = (work.first_row + row) % p.group;
      const T* q = static_cast<const T*>(p.q) + (work.start + token) * p.q_token_stride +
                   (work.kv_head * p.group + head) * p.q_head_stride + 8 * chunk;
      const bool is_valid = token < work.query_len;
      copy_async_or_zero<16>(memory + place_of(row, chunk), is_valid ? q : static_cast<const T*>(p.q), is_valid);
    }
    commit_copies();
  }

  // Which of the request's own rows each of this thread's two sees, as bits.
  __device__ __forceinline__ void load_words(uint64_t (&words)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      const int query = min((work.first_row + row) / p.group, work.query_len - 1);
      words[r] = p.tree_mask == nullptr ? (uint64_t{2} << query) - 1 : p.tree_mask[work.start + query];
    }
  }

  __device__ __forceinline__ void attend() {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    uint64_t words[2];
    load_words(words);
    bool is_first = true;
#pragma unroll 1
    for (int tile = work.tile; tile < work.end_tile; ++tile) {
      if (is_first) wait_for_copies<0>();  // the queries came last
      else wait_for_copies<SHAPE::kStages - 1>();
      is_first = false;
      fence_shared_for_engines();
      __syncthreads();
      multiply(tile, words);
      __syncthreads();
      copy_tile(tile + SHAPE::kStages);
    }
  }

  __device__ __forceinline__ void multiply(int tile, const uint64_t (&words)[2]) {
    float scores[kScores];
    const uint64_t queries = rows_operand(memory), keys = rows_operand(stage(tile));
    pin(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < SHAPE::kHeadDim / 16; ++k) {
      const uint64_t offset = (k / 4 * SHAPE::kSlabBytes + k % 4 * 32) >> 4;
      multiply_shared<T, SHAPE::kKeys>(scores, queries + offset, keys + offset, k > 0);
    }
    commit_products();
    wait_for_products<0>();
    pin(scores);
    if ((tile + 1) * SHAPE::kKeys > work.prefix()) hide(tile * SHAPE::kKeys - work.prefix(), words, scores);
    const float factor[2] = {p.scale * kLog2E, p.scale * kLog2E};
    float rescale[2];
    state.follow(scores, factor, rescale);
    uint32_t probs[kScores / 2];
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) probs[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= rescale[i / 2 % 2];
    multiply_values(tile, probs);
  }

  __device__ __forceinline__ void multiply_values(int tile, uint32_t (&probs)[kScores / 2]) {
    const uint64_t values = columns_operand(stage(tile) + SHAPE::kTileBytes, SHAPE::kSlabBytes);
    pin(out);
    pin(probs);
    begin_products();
#pragma unroll
    for (int k = 0; k < SHAPE::kKeys / 16; ++k) {
      multiply_columns<T>(out, probs + 4 * k, values + ((k * 16 * kSwizzleBytes) >> 4));
    }
    commit_products();
    wait_for_products<0>();
    pin(out);
  }

  // first: the tile's first slot, counted from the request's own rows.
  __device__ __forceinline__ void hide(int first, const uint64_t (&words)[2], float (&scores)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int draft = first + 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
      const bool is_seen = draft < 0 || (draft < work.query_len && (words[i / 2 % 2] >> draft & 1));
      if (!is_seen) scores[i] = kNothing;
    }
  }
};

template <typename SHAPE>
__global__ void __launch_bounds__(SHAPE::kThreads, 2)
    verify_attention_kernel(const __grid_constant__ VerifyParams p) {
  start_dependents();
  extern __shared__ __align__(kSwizzleUnit) char shared[];
  const uint32_t memory = shared_address(shared);
  const int unit = blockIdx.x / p.splits, rank = blockIdx.x % p.splits;
  VerifyWork work;
  if (!work.find<SHAPE::kKeys, SHAPE::kRows>(p, unit, rank)) {  // as all of the cluster
    await_previous();
    return;
  }
  Verifier<SHAPE> verifier{p, work, memory};
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
  VerifyMerge<SHAPE>{p, work, memory, rank}.run(verifier.state, verifier.out);
}

template <typename SHAPE>
cudaError_t launch(const VerifyParams& p, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_memory<verify_attention_kernel<SHAPE>, SHAPE::kTotalBytes>();
  if (allowed != cudaSuccess) return allowed;
  const ClusterLaunch<SHAPE> launch(p.num_requests * p.num_kv_heads * p.row_tiles, p.splits, p.is_dependent != 0, stream);
  return cudaLaunchKernelEx(&launch.config, verify_attention_kernel<SHAPE>, p);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_verify_attention(const VerifyParams* params, void* stream) {
  return slipstream::launch<slipstream::VerifyShape<SLIPSTREAM_TYPE>>(*params, static_cast<cudaStream_t>(stream));
}

// How many clusters of so many CTAs run at once on this device; 0: none.
SLIPSTREAM_API int slipstream_count_clusters(int splits) {
  using Shape = slipstream::VerifyShape<SLIPSTREAM_TYPE>;
  int count = 0;
  const auto error = slipstream::count_clusters<Shape, slipstream::verify_attention_kernel<Shape>>(splits, &count);
  return error == cudaSuccess ? count : 0;
}
