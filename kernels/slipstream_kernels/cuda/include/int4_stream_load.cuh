// The roles that fill the ring: one warp issues bulk copies of codes and words, before the kernel before has ended; the
// loader warps bring activations, as 16-bit numbers in the order in which codes come out of a word.
#pragma once

#include <cuda_fp8.h>

#include "bulk_copy.cuh"
#include "hopper_copy.cuh"
#include "int4_stream_shape.cuh"

namespace slipstream {

// Shared addresses of the ring's parts.
template <typename SHAPE>
struct Ring {
  uint32_t base;

  __device__ __forceinline__ uint32_t codes(int stage) const { return base + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t words(int stage) const { return codes(stage) + SHAPE::kCodeBytes; }
  __device__ __forceinline__ uint32_t activations(int stage) const { return words(stage) + SHAPE::kWordBytes; }
  __device__ __forceinline__ uint32_t filled(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t emptied(int stage) const { return filled(stage) + 8; }
};

// One block of a tile: eight strips of 16 output features, of which the last tile may have fewer, and their words. The
// lanes of a warp copy a strip each.
template <typename SHAPE>
__device__ __forceinline__ void copy_block(const Int4StreamParams& p, const Ring<SHAPE>& ring, int stage, int tile,
                                           int block, uint64_t policy) {
  const int lane = threadIdx.x % 32, blocks = p.in_features / SHAPE::kDepth;
  const int rows = min(SHAPE::kRows, p.out_features - tile * SHAPE::kRows), strips = rows / 16;
  const int word_bytes = rows * 4 * SHAPE::kGroups;
  if (lane == 0) arrive_expecting(ring.filled(stage), strips * SHAPE::kStripBytes + word_bytes);
  if (lane < strips) {
    const int64_t from = (int64_t{tile} * 8 + lane) * blocks + block;
    copy_bulk(ring.codes(stage) + lane * SHAPE::kStripBytes,
              reinterpret_cast<const char*>(p.codes) + from * SHAPE::kStripBytes, SHAPE::kStripBytes, ring.filled(stage),
              policy);
  } else if (lane == 8) {
    const int64_t group = p.is_channelwise != 0 ? 0 : block;
    const uint32_t* words = p.words + (group * p.out_features + tile * SHAPE::kRows) * SHAPE::kGroups;
    copy_bulk(ring.words(stage), words, word_bytes, ring.filled(stage), policy);
  }
}

template <typename SHAPE>
__device__ __forceinline__ void produce_codes(const Int4StreamParams& p, const Ring<SHAPE>& ring) {
  const uint64_t policy = evict_first_policy();
  RingPlace<SHAPE::kStages> place;
  for (Share share(p, blockIdx.x); !share.is_done();) {
    const Segment segment = share.take();
#pragma unroll 1
    for (int block = segment.begin; block < segment.end; ++block, place.advance()) {
      wait_barrier(ring.emptied(place.stage), place.parity ^ 1);
      copy_block<SHAPE>(p, ring, place.stage, segment.tile, block, policy);
    }
  }
}

// 32 activations of a token as words of two; those of e4m3 widened to fp16, exactly.
__device__ __forceinline__ uint4 load_16_bytes(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

template <typename SHAPE>
struct Activations32 {
  static constexpr bool kIsFp8 = sizeof(typename SHAPE::Input) == 1;
  static constexpr int kVectors = kIsFp8 ? 2 : 4;
  uint4 raw[kVectors];

  __device__ __forceinline__ void load(const Int4StreamParams& p, int token, int column) {
    const auto* row = static_cast<const typename SHAPE::Input*>(p.x) + token * p.x_row_stride + column;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      raw[i] = token < p.num_tokens ? load_16_bytes(reinterpret_cast<const uint4*>(row) + i) : make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ uint32_t word(int i) const {
    if constexpr (kIsFp8) {
      const uint32_t four = part(raw[i / 8], i / 2 % 4);
      const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(
          static_cast<__nv_fp8x2_storage_t>(i % 2 ? four >> 16 : four & 0xffff), __NV_E4M3);
      return uint32_t{pair.x} | uint32_t{pair.y} << 16;
    } else {
      return part(raw[i / 4], i % 4);
    }
  }

  static __device__ __forceinline__ uint32_t part(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }

  // Core-matrix row j of 4: the product j / 2 takes elements (4 q + 2 (j / 2) + j % 2) and 16 further, q = 0..3.
  __device__ __forceinline__ uint4 row(int j) const {
    const uint32_t select = j % 2 ? 0x7632 : 0x5410;
    uint32_t out[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) out[q] = __byte_perm(word(2 * q + j / 2), word(8 + 2 * q + j / 2), select);
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};

__device__ __forceinline__ void store_shared_16(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The thread's part of a stage's activations: 32 columns of one token, or of two. Read kBlocksAhead blocks before they
// are stored, so that the latency of L2 passes meanwhile.
template <typename SHAPE>
struct Loader {
  struct Items {
    Activations32<SHAPE> of[SHAPE::kItems];
  };
  static constexpr int kTokensApart = SHAPE::kColumns / SHAPE::kItems;
  const Int4StreamParams& p;
  const Ring<SHAPE>& ring;
  int token, part;   // its (first) token, and which of the block's four runs of 32 columns
  RingPlace<SHAPE::kStages> place;

  __device__ __forceinline__ void load(Items& to, int block) const {
#pragma unroll
    for (int i = 0; i < SHAPE::kItems; ++i) {
      to.of[i].load(p, token + i * kTokensApart, block * SHAPE::kDepth + 32 * part);
    }
  }

  __device__ __forceinline__ void store(const Items& values) {
    wait_barrier(ring.emptied(place.stage), place.parity ^ 1);
    const uint32_t base = ring.activations(place.stage) + part * 4 * SHAPE::kColumns * 16 + token * 16;
#pragma unroll
    for (int i = 0; i < SHAPE::kItems; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store_shared_16(base + i * kTokensApart * 16 + j * SHAPE::kColumns * 16, values.of[i].row(j));
      }
    }
    fence_shared_for_engines();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(ring.filled(place.stage));
    place.advance();
  }
};

template <typename SHAPE>
__device__ __forceinline__ void load_activations(const Int4StreamParams& p, const Ring<SHAPE>& ring, int thread) {
  constexpr int kAhead = SHAPE::kBlocksAhead;
  // Eight lanes hold the eight tokens of a core matrix: what they store lies side by side.
  Loader<SHAPE> loader{p, ring, thread % 8 + thread / 32 * 8, thread / 8 % 4};
  const Share share(p, blockIdx.x);
  const int total = static_cast<int>(share.end - share.next);
  int block = static_cast<int>(share.next % share.blocks);
  typename Loader<SHAPE>::Items values[kAhead];
  const auto load = [&](typename Loader<SHAPE>::Items& to) {
    loader.load(to, block);
    if (++block == share.blocks) block = 0;
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < total) load(values[i]);
  }
#pragma unroll 1
  for (int first = 0; first < total; first += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < total) loader.store(values[i]);
      if (first + i + kAhead < total) load(values[i]);
    }
  }
}

}  // namespace slipstream
