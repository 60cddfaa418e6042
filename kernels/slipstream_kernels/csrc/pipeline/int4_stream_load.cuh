// The producers: a kernel before permutes activations into the order in which codes come out of a word; a warp of the
// product issues bulk copies, of codes and words before that kernel has ended.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/int4_stream_shape.cuh"

namespace slipstream {

// 32 activations of a token.
template <typename SHAPE>
struct Activations32 {
  static constexpr int kVectors = 4;
  uint32_t words[4 * kVectors];

  __device__ __forceinline__ Activations32(const Int4StreamParams& p, int token, int column) {
    const auto* row = static_cast<const typename SHAPE::Operand*>(p.x) + token * p.x_row_stride + column;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 v = token < p.num_tokens ? load_global_16(reinterpret_cast<const uint4*>(row) + i) : uint4{};
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }

  // Row j of the four core matrices: the product j / 2 takes elements 4 q + 2 (j / 2) + j % 2 and 16 further, q = 0..3.
  __device__ __forceinline__ uint4 row(int j) const {
    uint32_t out[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      out[q] = __byte_perm(words[2 * q + j / 2], words[8 + 2 * q + j / 2], j % 2 ? 0x7632 : 0x5410);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};

// x -> for each block of 128 input features and as the products read them: core matrices of 8 tokens x 16 bytes, tokens
// that do not exist as zeros. One CTA a block; a thread takes 32 columns of a token at a time.
template <typename SHAPE>
__device__ __forceinline__ void arrange_block(const Int4StreamParams& p) {
  constexpr int kMatrixRows = 4;   // of 16 bytes, in 32 columns
  const int block = blockIdx.x;
  char* base = static_cast<char*>(p.arranged) + int64_t{block} * SHAPE::kActivationBytes;
  for (int item = threadIdx.x; item < SHAPE::kColumns * 4; item += blockDim.x) {
    const int token = item % 8 + item / 32 * 8, part = item / 8 % 4;
    const Activations32<SHAPE> values(p, token, block * SHAPE::kDepth + 32 * part);
#pragma unroll
    for (int j = 0; j < kMatrixRows; ++j) {
      *reinterpret_cast<uint4*>(base + (part * kMatrixRows + j) * SHAPE::kColumns * 16 + token * 16) = values.row(j);
    }
  }
}

// Shared addresses of the ring's parts.
template <typename SHAPE>
struct Ring {
  uint32_t base;

  __device__ __forceinline__ uint32_t codes(int stage) const { return base + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t words(int stage) const { return codes(stage) + SHAPE::kCodeBytes; }
  __device__ __forceinline__ uint32_t activations(int stage) const {
    return words(stage) + SHAPE::kBlocks * SHAPE::kWordBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

// The walk over a CTA's stages: up to two blocks of one tile each.
struct StageWalk {
  Share share;
  Segment segment;
  int block, num_blocks;

  __device__ __forceinline__ explicit StageWalk(const Int4StreamParams& p) : share(p, blockIdx.x), segment(share.take()) {
    block = segment.begin;
    num_blocks = min(2, segment.end - block);
  }

  // False: there is no more.
  __device__ __forceinline__ bool advance() {
    block += num_blocks;
    if (block == segment.end) {
      if (share.is_done()) return false;
      segment = share.take();
      block = segment.begin;
    }
    num_blocks = min(2, segment.end - block);
    return true;
  }
};

// Lanes 0..7 copy a strip's codes each, lanes 8 and 9 a block's words: the copy engine takes some 85 clocks for each
// copy, however small. The last tile may have fewer strips.
template <typename SHAPE>
__device__ __forceinline__ void copy_weights(const Int4StreamParams& p, const Ring<SHAPE>& ring, int stage,
                                             const StageWalk& walk, uint64_t policy) {
  const int lane = threadIdx.x % 32, tile = walk.segment.tile;
  const int rows = min(SHAPE::kRows, p.out_features - tile * SHAPE::kRows), strips = rows / 16;
  const int code_bytes = walk.num_blocks * SHAPE::kBlockBytes, word_bytes = rows * 4 * SHAPE::kGroups;
  if (lane == 0) {
    arrive_expecting(ring.full(stage),
                     strips * code_bytes + walk.num_blocks * (word_bytes + SHAPE::kActivationBytes));
  }
  if (lane < strips) {
    const int64_t from = (int64_t{tile} * SHAPE::kStrips + lane) * walk.share.blocks + walk.block;
    copy_bulk(ring.codes(stage) + lane * SHAPE::kBlocks * SHAPE::kBlockBytes,
              reinterpret_cast<const char*>(p.codes) + from * SHAPE::kBlockBytes, code_bytes, ring.full(stage), policy);
  }
  const int i = lane - SHAPE::kStrips;
  if (i >= 0 && i < walk.num_blocks) {
    const int64_t group = p.is_channelwise != 0 ? 0 : walk.block + i;
    const uint32_t* words = p.words + (group * p.out_features + tile * SHAPE::kRows) * SHAPE::kGroups;
    copy_bulk(ring.words(stage) + i * SHAPE::kWordBytes, words, word_bytes, ring.full(stage), policy);
  }
}

template <typename SHAPE>
__device__ __forceinline__ void copy_activations(const Int4StreamParams& p, const Ring<SHAPE>& ring, int stage,
                                                 const StageWalk& walk) {
  if (threadIdx.x % 32 != 0) return;
  copy_bulk(ring.activations(stage), static_cast<const char*>(p.arranged) + int64_t{walk.block} * SHAPE::kActivationBytes,
            walk.num_blocks * SHAPE::kActivationBytes, ring.full(stage), keep_policy());
}

template <typename SHAPE>
__device__ __forceinline__ void fill_stages(const Int4StreamParams& p, const Ring<SHAPE>& ring) {
  const uint64_t policy = evict_first_policy();
  StageWalk ahead(p), walk(p);
  bool has_more = true;
  int filled = 0;
  for (; filled < SHAPE::kStages && has_more; ++filled, has_more = ahead.advance()) {
    copy_weights<SHAPE>(p, ring, filled, ahead, policy);
  }
  await_previous();
  for (int stage = 0; stage < filled; ++stage, walk.advance()) copy_activations<SHAPE>(p, ring, stage, walk);
  RingPlace<SHAPE::kStages> place;
  place.parity = 1;   // the second pass
#pragma unroll 1
  for (; has_more; has_more = ahead.advance(), place.advance()) {
    wait_barrier(ring.empty(place.stage), place.parity ^ 1);
    copy_weights<SHAPE>(p, ring, place.stage, ahead, policy);
    copy_activations<SHAPE>(p, ring, place.stage, ahead);
  }
}

}  // namespace slipstream
