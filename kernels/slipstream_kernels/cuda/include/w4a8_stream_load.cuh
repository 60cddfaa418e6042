// The loading warps: codes and words by bulk copies, a strip or block each, tokens by tensor copies.
#pragma once

#include "bulk_copy.cuh"
#include "dependent_launch.cuh"
#include "w4a8_stream_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct W4a8Loader {
  const W4a8StreamParams& p;
  const CUtensorMap& map;
  W4a8Memory<SHAPE> memory;
  const W4a8Share& share;
  int loader;
  uint64_t policy = evict_first_policy();
  int lane = threadIdx.x % 32;

  __device__ __forceinline__ void run() const {
    W4a8Walk ahead(share), walk(share);
    int filled = 0;
    for (; filled < SHAPE::kStages && !ahead.is_done(); ++filled, ahead.advance()) copy_weights(filled, ahead);
    await_previous();
    for (int stage = 0; stage < filled; ++stage, walk.advance()) copy_tokens(stage, walk);
    RingPlace<SHAPE::kStages> place;
    place.parity = 1;   // the second time around
#pragma unroll 1
    for (; !ahead.is_done(); ahead.advance(), place.advance()) {
      wait_barrier(memory.emptied(place.stage), place.parity ^ 1);
      copy_weights(place.stage, ahead);
      copy_tokens(place.stage, ahead);
    }
  }

 private:
  // The loaders take strips in turn, a lane each; then each a block's words, and its tokens.
  __device__ __forceinline__ void copy_weights(int stage, const W4a8Walk& walk) const {
    const int strips = walk.num_strips(), blocks = walk.num_blocks(), first = walk.first_strip();
    const uint32_t code_bytes = blocks * SHAPE::kBlockBytes, word_bytes = strips * 16 * 4 * SHAPE::kGroups;
    if (loader == 0 && lane == 0) {
      arrive_expecting(memory.filled(stage), strips * code_bytes + blocks * (word_bytes + SHAPE::kTokenBytes));
    }
    __syncwarp();
    const int strip = lane * SHAPE::kLoaders + loader;
    if (strip < strips) {
      const int64_t from = int64_t{first + strip} * (p.in_features / 128) + walk.block;
      copy_bulk(memory.codes(stage) + strip * SHAPE::kStripBytes,
                static_cast<const char*>(p.codes) + from * SHAPE::kBlockBytes, code_bytes, memory.filled(stage), policy);
    }
    if (lane == 31 && loader < blocks) {
      const int64_t group = p.is_channelwise != 0 ? 0 : walk.block + loader;
      const uint32_t* words = p.words + (group * p.out_features + first * 16) * SHAPE::kGroups;
      copy_bulk(memory.words(stage) + loader * SHAPE::kWordBytes, words, word_bytes, memory.filled(stage), policy);
    }
  }

  __device__ __forceinline__ void copy_tokens(int stage, const W4a8Walk& walk) const {
    if (lane != 0 || loader >= walk.num_blocks()) return;
    copy_box(memory.tokens(stage) + loader * SHAPE::kTokenBytes, &map, memory.filled(stage), kReadOften,
             (walk.block + loader) * 128, 0);
  }
};

}  // namespace slipstream
