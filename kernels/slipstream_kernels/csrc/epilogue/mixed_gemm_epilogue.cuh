// The end of a pass: sums of warpgroups and of a cluster's CTAs are added in a fixed order, scaled, biased and written.
#pragma once

#include "mma/warp_mma.cuh"
#include "schedule/mixed_gemm_shape.cuh"

namespace slipstream {

// Writes sums of one tile and eight tokens, with the constants that lie in shared memory.
template <typename SHAPE, typename OUT>
struct MixedGemmWriter {
  const MixedGemmParams& p;
  MixedGemmMemory<SHAPE> memory;
  const MixedGemmWork<SHAPE>& work;
  int lane = threadIdx.x % 32;

  // The weight's row behind a pass's row, counted from the tile `first` on.
  __device__ __forceinline__ int weight_row(int first, int local) const {
    if constexpr (!SHAPE::kIsByRows) return 16 * first + local;
    const int tile = first + local / 16;
    return p.is_gated != 0 ? 8 * tile + local % 8 + local / 8 % 2 * (p.out_features / 2) : 16 * tile + local % 16;
  }

  // sum: rows l / 4 and l / 4 + 8 of the pass's tile `local`, tokens 8 group + 2 (l % 4) + 0, 1.
  __device__ __forceinline__ void write(int pass, int first, int local, int group, const float4& sum) const {
    const int tile = first + local, token = 8 * group + lane / 4;
    const float parts[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
    float token_scales[2] = {1.0f, 1.0f}, values[2][2];
    if constexpr (SHAPE::kIsE4m3) {
      const uint2 scales = load_shared_8(memory.token_scales(pass) + 4 * (8 * group + 2 * (lane % 4)));
      token_scales[0] = __uint_as_float(scales.x), token_scales[1] = __uint_as_float(scales.y);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * local + lane / 4 + 8 * half;
      const float scale = __uint_as_float(load_shared_4(memory.row_scales(pass) + 4 * row)), bias = bias_of(pass, row);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (SHAPE::kIsE4m3) values[half][e] = parts[half][e] * token_scales[e] * scale + bias;
        else values[half][e] = parts[half][e] * scale + bias;
      }
      if constexpr (SHAPE::kIsE4m3) store(token, p.out_features, 16 * tile + 8 * half, values[half]);
    }
    if constexpr (SHAPE::kIsE4m3) return;
    if (SHAPE::kIsByRows && p.is_gated != 0) {
#pragma unroll
      for (int e = 0; e < 2; ++e) values[0][e] = values[0][e] / (1.0f + __expf(-values[0][e])) * values[1][e];
      store(token, p.out_features / 2, 8 * tile, values[0]);
      return;
    }
    store(token, p.out_features, 16 * tile, values[0]);
    store(token, p.out_features, 16 * tile + 8, values[1]);
  }

  // To shared memory, while weights are on their way: finish_constants, then a barrier, before they are read.
  __device__ __forceinline__ void load_row(int pass, int local, const float* scale, const OUT* bias, int64_t row) const {
    copy_async<4>(memory.row_scales(pass) + 4 * local, scale + row);
    if (bias != nullptr && local % 2 == 0) copy_async<4>(memory.biases(pass) + 2 * local, bias + row);
  }

  static __device__ __forceinline__ void finish_constants() {
    commit_copies();
    wait_for_copies<0>();
  }

 private:
  // Transposed: lane l has token l / 4 and features 2 (l % 4), + 1 of the eight.
  __device__ __forceinline__ void store(int token, int width, int column, const float (&values)[2]) const {
    const uint32_t pair = transpose_8x8(pack<OUT>(values[0], values[1]));
    if constexpr (SHAPE::kTokens == 4) token = token % 2 == 0 ? token / 2 : SHAPE::kTokens;   // every second place of eight
    if (token >= work.num_tokens) return;
    OUT* out = static_cast<OUT*>(p.out) + int64_t{work.first_token + token} * width + column + 2 * (lane % 4);
    *reinterpret_cast<uint32_t*>(out) = pair;
  }

  __device__ __forceinline__ float bias_of(int pass, int row) const {
    if (p.bias == nullptr) return 0.0f;
    const auto bits = static_cast<unsigned short>(load_shared_4((memory.biases(pass) + 2 * row) & ~3u) >> (row % 2 * 16));
    if constexpr (__is_same(OUT, __half)) return __half2float(__ushort_as_half(bits));
    else return __bfloat162float(__ushort_as_bfloat16(bits));
  }
};

template <typename SHAPE, typename OUT>
struct MixedGemmEpilogue {
  const MixedGemmParams& p;
  MixedGemmMemory<SHAPE> memory;
  const MixedGemmWork<SHAPE>& work;
  MixedGemmWriter<SHAPE, OUT> writer{p, memory, work};
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // Loads scales and bias of a pass's rows. All consumers take part; the kernel before may still run.
  __device__ __forceinline__ void load_rows(int pass) const {
    const int first = work.pass_begin(pass), tiles = work.pass_begin(pass + 1) - first, local = threadIdx.x;
    if (local >= 16 * tiles) return;
    writer.load_row(pass, local, p.channel_scale, static_cast<const OUT*>(p.bias), writer.weight_row(first, local));
  }

  // Loads scales of tokens, when the kernel before has ended.
  __device__ __forceinline__ void load_tokens(int pass) const {
    if constexpr (SHAPE::kIsE4m3) {
      const int token = threadIdx.x;
      if (token >= SHAPE::kColumns) return;
      const float* scales = p.token_scale + work.first_token;
      copy_async_or_zero<4>(memory.token_scales(pass) + 4 * token, scales + token, token < work.num_tokens);
    }
  }

  // sums of group i: rows l / 4 and l / 4 + 8 of the warp's tile, tokens 8 i + 2 (l % 4) + 0, 1. They are used up.
  __device__ __forceinline__ void write(int pass, float (&sums)[SHAPE::kSums]) const {
    const int first = work.pass_begin(pass), tiles = work.pass_begin(pass + 1) - first;
    writer.finish_constants();
    if (SHAPE::kWarpgroupsK > 1 || p.splits > 1) return exchange(pass, first, tiles, sums);
    sync_threads(1, SHAPE::kConsumers);   // the constants are there
    if (warp >= tiles) return;
#pragma unroll 1
    for (int group = 0; group < SHAPE::kTokenGroups; group += kAtOnce) write_groups(pass, first, group, sums);
  }

 private:
  // Groups of eight tokens. Sums move down and the code is a loop: instructions for all at once would come from L2.
  static constexpr int kAtOnce = SHAPE::kColumns > 64 && !SHAPE::kIsE4m3 ? 4 : SHAPE::kTokenGroups;

  __device__ __forceinline__ void write_groups(int pass, int first, int group, float (&left)[SHAPE::kSums]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (8 * (group + i) < work.num_tokens) writer.write(pass, first, warp, group + i, sums_of(left, i));
    }
#pragma unroll
    for (int i = 4 * kAtOnce; i < SHAPE::kSums; ++i) left[i - 4 * kAtOnce] = left[i];
  }

  static __device__ __forceinline__ float4 sums_of(const float* sums, int i) {
    return make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }

  // Warps leave their sums in shared memory; each of all CTAs of the cluster adds an equal part up.
  __device__ __forceinline__ void exchange(int pass, int first, int tiles, const float (&sums)[SHAPE::kSums]) const {
    sync_threads(1, SHAPE::kConsumers);   // the ring has been read
#pragma unroll
    for (int i = 0; i < SHAPE::kTokenGroups; ++i) {
      const float4 v = sums_of(sums, i);
      store_shared_16(memory.exchange(warp, i) + lane * 16, v.x, v.y, v.z, v.w);
    }
    sync_all();
    const int num_groups = tiles * ((work.num_tokens + 7) / 8);
#pragma unroll 1
    for (int group = work.rank + p.splits * warp; group < num_groups; group += p.splits * SHAPE::kWarps) {
      float4 sum = {};
#pragma unroll 4
      for (int rank = 0; rank < p.splits; ++rank) {
#pragma unroll
        for (int depth = 0; depth < SHAPE::kWarpgroupsK; ++depth) {
          const int source = depth * SHAPE::kTiles + group % tiles;
          const uint32_t part = memory.exchange(source, group / tiles) + lane * 16;
          const float4 v = p.splits == 1 ? load_own(part) : load_from_cluster(address_in(part, rank));
          sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
      }
      writer.write(pass, first, group % tiles, group / tiles, sum);
    }
    if (p.splits > 1) sync_all();   // no CTA ends while others may read from it
  }

  __device__ __forceinline__ void sync_all() const {
    if (p.splits == 1) return sync_threads(1, SHAPE::kConsumers);
    arrive_in_cluster();
    wait_for_cluster();
  }
};

}  // namespace slipstream
