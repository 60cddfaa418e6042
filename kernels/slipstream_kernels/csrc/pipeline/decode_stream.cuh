// One warp's stream of tiles: every kWarps-th tile of each segment of the CTA's share, copied to a ring of its own in
// shared memory several tiles ahead of their use, across the borders of segments. No warp waits for another.
#pragma once

#include "schedule/decode_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct TileStream {
  const DecodeParams& p;
  const int* ends;
  typename SHAPE::Walk walk;
  Segment segment;
  uint32_t ring;   // shared address of this warp's first stage
  int tile;
  int block;       // of `tile`, fetched one step before it is needed
  bool is_done;

  __device__ __forceinline__ TileStream(const DecodeParams& params, const int* tile_ends,
                                        const typename SHAPE::Walk& share, uint32_t first_stage)
      : p(params), ends(tile_ends), walk(share), ring(first_stage), is_done(false) {
    segment.end = 0;
    tile = 0;
    settle();
  }

  __device__ __forceinline__ void settle() {
    while (!is_done && tile >= segment.end) {
      is_done = !walk.advance(p, ends, segment);
      tile = segment.begin + threadIdx.x / 32;
    }
    if (!is_done) {
      const int token = (segment.work.first_tile + tile) * kTileTokens;
      block = p.block_tables[segment.request * p.table_stride + (token >> p.block_size_log2)];
    }
  }

  // Whether the next tile holds keys of former steps only.
  __device__ __forceinline__ bool is_next_settled() const {
    const int end = (segment.work.first_tile + tile + 1) * kTileTokens;
    return !is_done && end <= segment.work.seq_len - segment.work.query_len;
  }

  // Starts the copy of the next tile into `stage`, and commits it (an empty group after the end).
  __device__ __forceinline__ void copy_next(int stage) {
    if (!is_done) {
      const int token = (segment.work.first_tile + tile) * kTileTokens;
      const int in_block = token & ((1 << p.block_size_log2) - 1);
      const int64_t head_block = static_cast<int64_t>(max(block, 0)) * p.num_kv_heads + segment.kv_head;
      const int64_t row = (head_block << p.block_size_log2) + in_block;
      copy_tile(ring + stage * SHAPE::kStageBytes, row, segment.work.seq_len - token);
      tile += SHAPE::kWarps;
      settle();
    }
    commit_copies();
  }

 private:
  // Slots past the sequence may hold a former owner's inf or NaN, which a probability of 0 does not silence: zeros.
  __device__ __forceinline__ void copy_tile(uint32_t stage, int64_t row, int num_valid) {
    constexpr int kBytes = SHAPE::kCopyBytes;
    const int lane = threadIdx.x % 32;
    const char* keys = static_cast<const char*>(p.key_cache) + row * SHAPE::kRowBytes;
    const char* values = static_cast<const char*>(p.value_cache) + row * SHAPE::kRowBytes;
#pragma unroll
    for (int first = 0; first < SHAPE::kCopies; first += 32) {
      const int copy = first + lane;
      const int token = copy / SHAPE::kCopiesPerRow;
      const uint32_t to = stage + token * SHAPE::kStride + copy % SHAPE::kCopiesPerRow * kBytes;
      if (first + 32 <= SHAPE::kCopies || copy < SHAPE::kCopies) {
        copy_async_or_zero<kBytes>(to, keys + copy * kBytes, token < num_valid);
        copy_async_or_zero<kBytes>(to + kTileTokens * SHAPE::kStride, values + copy * kBytes, token < num_valid);
      }
    }
    if constexpr (SHAPE::Format::kIsInteger) {
      const float* scales = lane < kTileTokens ? p.key_scale : p.value_scale;
      const int token = lane % kTileTokens;
      copy_async_or_zero<4>(stage + SHAPE::kScaleOffset + lane * 4, scales + row + token, token < num_valid);
    }
  }
};

}  // namespace slipstream
