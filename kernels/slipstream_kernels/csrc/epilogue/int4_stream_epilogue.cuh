// The end of a tile: sums of CTAs that share it are added in the order of the CTAs, scaled, biased and written.
#pragma once

#include "ptx/hopper_copy.cuh"
#include "schedule/int4_stream_shape.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

template <typename SHAPE>
struct TileEpilogue {
  static constexpr int kSums = SHAPE::kSums;
  using Out = typename SHAPE::Operand;
  const Int4StreamParams& p;
  float4* exchange;   // shared: sums of the warpgroups that multiply second blocks
  int* flag;          // shared: whether this CTA came last
  int thread;         // of the consumers; the first half write

  // Adds the sums of second blocks to those of first blocks, in the registers of the writers.
  __device__ __forceinline__ void join(float (&sums)[kSums]) const {
    const bool is_writer = thread < SHAPE::kWriters;
    float4* mine = exchange + thread % SHAPE::kWriters;
    sync_threads(2, SHAPE::kConsumers);   // what the segment before left is read
    if (!is_writer) leave(mine, sums);
    sync_threads(2, SHAPE::kConsumers);
    if (!is_writer) return;
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) accumulate(mine[i * SHAPE::kWriters], i, sums);
  }

  // Adds what the other CTAs of the tile have, if this one is the last of them. False: another CTA will write.
  __device__ __forceinline__ bool collect(const Segment& segment, int blocks, float (&sums)[kSums]) const {
    if (segment.is_whole(blocks)) return true;
    const int64_t start = int64_t{segment.tile} * blocks;
    const int first = Share::cta_of(p, start), last = Share::cta_of(p, start + blocks - 1);
    leave(part(blockIdx.x, segment.begin == 0), sums);
    __threadfence();
    sync_threads(1, SHAPE::kWriters);
    if (thread == 0) {
      const int before = atomicAdd(p.arrivals + segment.tile, 1);
      *flag = before == last - first;
      if (*flag) p.arrivals[segment.tile] = 0;
      __threadfence();
    }
    sync_threads(1, SHAPE::kWriters);
    if (*flag == 0) return false;
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
#pragma unroll 4
    for (int cta = first; cta <= last; ++cta) add(part(cta, cta == first), sums);
    return true;
  }

  // A thread holds rows l / 4 and l / 4 + 8 of its warp's 16, and tokens 8 i + 2 (l % 4) + 0, 1.
  __device__ __forceinline__ void write(int tile, const float (&sums)[kSums]) const {
    const int lane = thread % 32, row = tile * SHAPE::kRows + thread / 32 * 16 + lane / 4;
    if (row >= p.out_features) return;   // the last tile's second half; a warp as a whole
    float scale[2], bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = __ldg(p.channel_scale + row + 8 * half);
      if (p.bias != nullptr) bias[half] = to_float(static_cast<const Out*>(p.bias)[row + 8 * half]);
    }
#pragma unroll
    for (int i = 0; i < SHAPE::kColumns / 8; ++i) {
      if (8 * i >= p.num_tokens) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = sums[4 * i + 2 * half] * scale[half] + bias[half];
        const float high = sums[4 * i + 2 * half + 1] * scale[half] + bias[half];
        // Lane l now has token l / 4 and rows 2 (l % 4), + 1.
        const uint32_t pair = transpose_8x8(pack<Out>(low, high));
        const int written = 8 * i + lane / 4, column = tile * SHAPE::kRows + thread / 32 * 16 + 8 * half + 2 * (lane % 4);
        if (written < p.num_tokens) {
          Out* out = static_cast<Out*>(p.out) + int64_t{written} * p.out_features + column;
          *reinterpret_cast<uint32_t*>(out) = pair;
        }
      }
    }
  }

 private:
  // A CTA leaves at most two tiles' sums: of the tile that it begins (and does not end), and of one that it goes on
  // with.
  __device__ __forceinline__ float4* part(int cta, bool is_begun) const {
    const int64_t index = int64_t{2 * cta + (is_begun ? 1 : 0)} * SHAPE::kWriters * (kSums / 4);
    return reinterpret_cast<float4*>(p.partials) + index + thread;
  }

  static __device__ __forceinline__ void leave(float4* to, const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      to[i * SHAPE::kWriters] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
  }

  static __device__ __forceinline__ void accumulate(const float4& v, int i, float (&sums)[kSums]) {
    sums[4 * i] += v.x, sums[4 * i + 1] += v.y, sums[4 * i + 2] += v.z, sums[4 * i + 3] += v.w;
  }

  static __device__ __forceinline__ void add(const float4* from, float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) accumulate(__ldcg(from + i * SHAPE::kWriters), i, sums);
  }
};

}  // namespace slipstream
