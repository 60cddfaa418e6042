// The end of a segment of a streaming product. The sums of a whole tile are scaled, biased, transposed and written. Those of a
// part of a tile's chunks go to a slot in global memory; CTAs that see all slots of a tile written add them, part by part, in
// the order of the chunks, so that the result is the same in every run.
//
// No CTA depends on another one that may not run yet: the one that writes the last slot of a tile adds all parts that are left.
// Others that have nothing more to do wait for that moment, but not for ever, and take parts, too.
// Counters of a tile: slots written; parts taken; CTAs that will not look at these again, the last of whom zeroes
// all three.
#pragma once

#include "mma/stream_sums.cuh"
#include "mma/warp_mma.cuh"
#include "ptx/gpu_order.cuh"
#include "ptx/hopper_copy.cuh"
#include "ptx/memory_access.cuh"
#include "schedule/stream_runs.cuh"

// Clocks that a CTA waits for others' sums, some 60 us; tests have other numbers.
#ifndef SLIPSTREAM_MAX_WAIT_CLOCKS
#define SLIPSTREAM_MAX_WAIT_CLOCKS 100000
#endif

namespace slipstream {

// The unit of a tile that this warp has.
__device__ __forceinline__ int stream_unit(int warpgroup) { return warpgroup * 4 + threadIdx.x % 128 / 32; }

// MEMORY: has word(), and token_scales() of products with such. WORK: has runs and tile().
template <typename SHAPE, typename MEMORY, typename WORK>
struct StreamEpilogue {
  using T = typename SHAPE::Out;
  const typename SHAPE::Params& p;
  const MEMORY memory;
  const WORK work;
  const int warpgroup;
  float weight_scales[2], biases[2];

  // Loads the scales of a tile's rows; they do not depend on the kernel before.
  __device__ __forceinline__ void load_weight_scales(int tile) {
    const int unit = min(tile_at(tile).begin + stream_unit(warpgroup), p.num_units - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) weight_scales[half] = __ldg(p.scale + weight_row(unit, half));
  }

  // By all consumers, after the kernel before has ended.
  __device__ __forceinline__ void load_token_scales() const {
    for (int token = threadIdx.x; token < SHAPE::kScaledTokens; token += SHAPE::kConsumerThreads) {
      const float scale = token < p.num_tokens ? p.x_scale[token] : 0.0f;
      store_shared_4(memory.token_scales() + 4 * token, scale);
    }
    sync();
  }

  __device__ __forceinline__ void write(const StreamSegment& segment, StreamSums<SHAPE>& sums, bool is_last_of_run) {
    const StreamTile tile = tile_at(segment.tile);
    load_biases(tile.begin);
    const int num_chunks = static_cast<int>(work.runs.num_chunks), cta = blockIdx.x;
    if (segment.begin_chunk == 0 && segment.end_chunk == num_chunks) return finish_all(tile, sums);
    const int first_chunk = segment.tile * num_chunks;
    const int first = work.runs.owner(first_chunk), last = work.runs.owner(first_chunk + num_chunks - 1);
    int* counters = p.counters + segment.tile * 4;
    if (last - first == 1 && is_other_written(counters)) {
      add_other(first == cta ? last : first, first, sums);
      if (threadIdx.x == 0) {
        atomicExch(counters + 1, SHAPE::kParts);   // all are taken
        fence_gpu();
        atomicAdd(counters, 1);
      }
      finish_all(tile, sums);
    } else {
      store_slot(first == cta, sums);
      if (all_are_written(counters, last - first + 1, is_last_of_run)) add_parts(tile, first, last, counters);
    }
    if (threadIdx.x == 0) leave(counters, last - first + 1);
  }

 private:
  // Where a lane writes the four outputs that it has of its token of a group of eight.
  struct Output {
    T* of_lane;
    int64_t stride;     // of eight tokens
    int tokens_left;    // of the tile, of this lane's on; none if it has no weight rows of the tile
    int first_token;    // of the tile

    __device__ __forceinline__ void advance(int groups) { of_lane += groups * stride, tokens_left -= 8 * groups; }
  };

  __device__ __forceinline__ StreamTile tile_at(int index) const { return work.tile(p, index); }

  static __device__ __forceinline__ void sync() { sync_threads(1, SHAPE::kConsumerThreads); }

  static __device__ __forceinline__ int weight_row(int unit, int half) {
    return 16 * unit + 8 * half + threadIdx.x % 32 / 4;
  }

  static __device__ __forceinline__ void own_sums(const StreamSums<SHAPE>& sums, int group, float (&v)[4]) {
    const float* from = &sums.of[group / SHAPE::kBlockGroups][group % SHAPE::kBlockGroups * 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = from[i];
  }

  // A CTA has two slots: of a tile that it begins, and of one that it goes on with.
  __device__ __forceinline__ float4* slot(int cta, bool begins) const {
    const int index = cta * 2 + (begins ? 1 : 0);
    return reinterpret_cast<float4*>(p.partial_sums + static_cast<int64_t>(index) * SHAPE::kSlotFloats);
  }
  static __device__ __forceinline__ int place(int group) { return group * SHAPE::kConsumerThreads + threadIdx.x; }

  // Tells all consumers what the first of them knows.
  __device__ __forceinline__ int broadcast(int value) const {
    if (threadIdx.x == 0) store_shared_4(memory.word(), static_cast<uint32_t>(value));
    sync();
    const int told = static_cast<int>(load_shared_4(memory.word()));
    sync();   // before it is overwritten
    return told;
  }

  __device__ __forceinline__ bool is_other_written(const int* counters) const {
    return broadcast(threadIdx.x == 0 ? load_acquire(counters) : 0) == 1;
  }

  // Two CTAs share a tile, and the other one has been here: own sums stay in registers.
  __device__ __forceinline__ void add_other(int other, int first, StreamSums<SHAPE>& sums) const {
    const float4* from = slot(other, other == first);
#pragma unroll
    for (int group = 0; group < SHAPE::kGroups; ++group) {
      const float4 partial = __ldcg(from + place(group));
      float* to = &sums.of[group / SHAPE::kBlockGroups][group % SHAPE::kBlockGroups * 4];
      to[0] += partial.x, to[1] += partial.y, to[2] += partial.z, to[3] += partial.w;
      if (group % 8 == 7) __syncwarp();   // all loads at once would spill registers
    }
  }

  __device__ __forceinline__ void finish_all(const StreamTile& tile, const StreamSums<SHAPE>& sums) const {
    Output output = output_of(tile);
#pragma unroll
    for (int group = 0; group < SHAPE::kGroups; ++group, output.advance(1)) {
      float v[4];
      own_sums(sums, group, v);
      finish(output, group, v);
    }
  }

  __device__ __forceinline__ void load_biases(int begin) {
    const int unit = min(begin + stream_unit(warpgroup), p.num_units - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      biases[half] = p.bias == nullptr ? 0.0f : to_float(static_cast<const T*>(p.bias)[weight_row(unit, half)]);
    }
  }

  __device__ __forceinline__ void store_slot(bool begins, const StreamSums<SHAPE>& sums) const {
    float4* to = slot(blockIdx.x, begins);
#pragma unroll
    for (int group = 0; group < SHAPE::kGroups; ++group) {
      float v[4];
      own_sums(sums, group, v);
      __stcg(to + place(group), make_float4(v[0], v[1], v[2], v[3]));
    }
    sync();
  }

  // Counts this CTA's slot. Whether all are written, for which it waits if it may.
  __device__ __forceinline__ bool all_are_written(int* counters, int count, bool may_wait) const {
    int written = 0;
    if (threadIdx.x == 0) {
      fence_gpu();
      written = atomicAdd(counters, 1) + 1;
      const int64_t start = clock64();
      while (may_wait && written < count && clock64() - start < SLIPSTREAM_MAX_WAIT_CLOCKS) written = load_acquire(counters);
      fence_gpu();
    }
    return broadcast(written) == count;
  }

  __device__ __forceinline__ void add_parts(const StreamTile& tile, int first, int last, int* counters) const {
    const Output output = output_of(tile);
#pragma unroll 1
    for (int next = take_part(counters);;) {
      const int part = broadcast(next);
      if (part >= SHAPE::kParts) return;
      next = take_part(counters);   // known when this part has been added
      add_part(output, first, last, part);
    }
  }

  // The first thread's: the number of a part that nobody else takes; from kParts on: none is left.
  static __device__ __forceinline__ int take_part(int* counters) {
    return threadIdx.x == 0 ? atomicAdd(counters + 1, 1) : 0;
  }

  __device__ __forceinline__ void add_part(Output output, int first, int last, int part) const {
    float v[SHAPE::kPartGroups][4] = {};
#pragma unroll 2
    for (int cta = first; cta <= last; ++cta) {
      const float4* from = slot(cta, cta == first);
#pragma unroll
      for (int i = 0; i < SHAPE::kPartGroups; ++i) {
        const float4 partial = __ldcg(from + place(part * SHAPE::kPartGroups + i));
        v[i][0] += partial.x, v[i][1] += partial.y, v[i][2] += partial.z, v[i][3] += partial.w;
      }
    }
    output.advance(part * SHAPE::kPartGroups);
#pragma unroll
    for (int i = 0; i < SHAPE::kPartGroups; ++i, output.advance(1)) finish(output, part * SHAPE::kPartGroups + i, v[i]);
  }

  static __device__ __forceinline__ void leave(int* counters, int count) {
    if (atomicAdd(counters + 2, 1) != count - 1) return;
    counters[0] = counters[1] = counters[2] = 0;
    fence_gpu();
  }

  __device__ __forceinline__ Output output_of(const StreamTile& tile) const {
    const int unit = tile.begin + stream_unit(warpgroup), lane = threadIdx.x % 32, token = tile.first_token + lane / 4;
    T* out = static_cast<T*>(p.out) + token * p.out_row_stride + 16 * unit + lane % 2 * 8 + lane % 4 / 2 * 4;
    int64_t stride = 8 * p.out_row_stride;
    asm volatile("" : "+l"(out), "+l"(stride));   // or both would be computed again for each group
    return {out, stride, unit < tile.end ? p.num_tokens - token : 0, tile.first_token};
  }

  // 16 weight rows (a warp's unit) of 8 tokens. Lane q of a token's four has outputs 2 q and 2 q + 1 of each eight.
  // Two lanes exchange them, so that each has four of one eight: four lanes write the 32 bytes of a sector at once.
  __device__ __forceinline__ void finish(const Output& output, int group, float (&v)[4]) const {
    scale(output.first_token + 8 * group, v);
    const uint32_t low = transpose_8x8(pack<T>(v[0], v[1])), high = transpose_8x8(pack<T>(v[2], v[3]));
    const bool is_odd = threadIdx.x % 2 != 0;
    const uint32_t received = __shfl_xor_sync(~0u, is_odd ? low : high, 1);
    if (output.tokens_left > 0) store_global_8(output.of_lane, is_odd ? received : low, is_odd ? high : received);
  }

  // Scales the sums of eight tokens.
  __device__ __forceinline__ void scale(int first_token, float (&v)[4]) const {
    if constexpr (SHAPE::kHasTokenScales) {
      const uint2 scales = load_shared_8(memory.token_scales() + 4 * (first_token + threadIdx.x % 4 * 2));
      const float token_scales[2] = {__uint_as_float(scales.x), __uint_as_float(scales.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = v[i] * (token_scales[i % 2] * weight_scales[i / 2]) + biases[i / 2];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = v[i] * weight_scales[i / 2] + biases[i / 2];
    }
  }
};

}  // namespace slipstream
