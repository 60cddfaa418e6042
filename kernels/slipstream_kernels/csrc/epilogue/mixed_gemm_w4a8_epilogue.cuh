// The end of a pass: sums of warpgroups and of a cluster's CTAs are added in a fixed order, scaled, biased and written.
#pragma once

#include "schedule/mixed_gemm_w4a8_shape.cuh"

namespace slipstream {

template <typename SHAPE, typename OUT>
struct W4a8Epilogue {
  const MixedGemmW4a8Params& p;
  W4a8Memory<SHAPE> memory;
  const W4a8Share<SHAPE>& share;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // What the end of a pass needs, to shared memory while weights are on their way. By all multipliers; rows of the first
  // pass before the kernel before has ended.
  __device__ __forceinline__ void load_rows(int pass) const {
    const int first = share.pass_begin(pass), strips = share.pass_begin(pass + 1) - first, local = threadIdx.x;
    if (local >= 16 * strips) return;
    copy_async<4>(memory.row_scales(pass) + 4 * local, p.channel_scale + 16 * first + local);
    const OUT* bias = static_cast<const OUT*>(p.bias);
    if (bias != nullptr && local % 2 == 0) copy_async<4>(memory.biases(pass) + 2 * local, bias + 16 * first + local);
  }

  __device__ __forceinline__ void load_tokens(int pass) const {
    const int token = threadIdx.x;
    if (token >= SHAPE::kColumns) return;
    copy_async_or_zero<4>(memory.token_scales(pass) + 4 * token, p.token_scale + token, token < p.num_tokens);
  }

  // sums of group i: rows l / 4 and l / 4 + 8 of the warp's strip, tokens 8 i + 2 (l % 4) + 0, 1.
  __device__ __forceinline__ void write(int pass, const float (&sums)[SHAPE::kSums]) const {
    const int first = share.pass_begin(pass), strips = share.pass_begin(pass + 1) - first;
    commit_copies();
    wait_for_copies<0>();
    if (SHAPE::kWarpgroupsK > 1 || p.splits > 1) return exchange(pass, first, strips, sums);
    sync_threads(1, SHAPE::kConsumers);   // scales are there
    if (warp >= strips) return;
#pragma unroll
    for (int i = 0; i < SHAPE::kColumns / 8; ++i) {
      if (8 * i < p.num_tokens) write_group(pass, first, warp, i, sums_of(sums, i));
    }
  }

 private:
  static __device__ __forceinline__ float4 sums_of(const float (&sums)[SHAPE::kSums], int i) {
    return make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }

  // Warps leave their sums in shared memory; of all CTAs of the cluster, each adds an equal part up.
  __device__ __forceinline__ void exchange(int pass, int first, int strips, const float (&sums)[SHAPE::kSums]) const {
    sync_threads(1, SHAPE::kConsumers);   // the ring has been read
#pragma unroll
    for (int i = 0; i < SHAPE::kColumns / 8; ++i) {
      const float4 v = sums_of(sums, i);
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(memory.exchange(warp, i) + lane * 16), "f"(v.x), "f"(v.y),
                   "f"(v.z), "f"(v.w) : "memory");
    }
    sync_all();
    const int num_groups = strips * ((p.num_tokens + 7) / 8);
#pragma unroll 1
    for (int group = share.rank + p.splits * warp; group < num_groups; group += p.splits * (SHAPE::kConsumers / 32)) {
      float4 sum = {};
#pragma unroll 4
      for (int rank = 0; rank < p.splits; ++rank) {
#pragma unroll
        for (int depth = 0; depth < SHAPE::kWarpgroupsK; ++depth) {
          const uint32_t part = memory.exchange(depth * SHAPE::kStrips + group % strips, group / strips) + lane * 16;
          const float4 v = p.splits == 1 ? load_own(part) : load_from_cluster(address_in(part, rank));
          sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
      }
      write_group(pass, first, group % strips, group / strips, sum);
    }
    if (p.splits > 1) sync_all();   // no CTA ends while others may read from it
  }

  __device__ __forceinline__ void sync_all() const {
    if (p.splits == 1) return sync_threads(1, SHAPE::kConsumers);
    arrive_in_cluster();
    wait_for_cluster();
  }

  // Eight tokens of the pass's strip `local`.
  __device__ __forceinline__ void write_group(int pass, int first, int local, int group, const float4& sum) const {
    const uint2 tokens = load_shared_8(memory.token_scales(pass) + 4 * (8 * group + 2 * (lane % 4)));
    const float token_scales[2] = {__uint_as_float(tokens.x), __uint_as_float(tokens.y)};
    const float parts[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * local + lane / 4 + 8 * half;
      const float scale = __uint_as_float(load_shared_4(memory.row_scales(pass) + 4 * row)), bias = bias_of(pass, row);
      float values[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) values[e] = parts[half][e] * token_scales[e] * scale + bias;
      // Turned round: lane l has token l / 4 and features 2 (l % 4), + 1 of the eight.
      const uint32_t pair = transpose_8x8(pack<OUT>(values[0], values[1]));
      const int token = 8 * group + lane / 4, column = 16 * (first + local) + 8 * half + 2 * (lane % 4);
      if (token >= p.num_tokens) continue;
      *reinterpret_cast<uint32_t*>(static_cast<OUT*>(p.out) + int64_t{token} * p.out_features + column) = pair;
    }
  }

  __device__ __forceinline__ float bias_of(int pass, int row) const {
    if (p.bias == nullptr) return 0.0f;
    const auto bits = static_cast<unsigned short>(load_shared_4((memory.biases(pass) + 2 * row) & ~3u) >> (row % 2 * 16));
    if constexpr (__is_same(OUT, __half)) {
      return __half2float(__ushort_as_half(bits));
    } else {
      return __bfloat162float(__ushort_as_bfloat16(bits));
    }
  }
};

}  // namespace slipstream
