// The end of a pass: sums of a cluster's CTAs are added in the order of the CTAs, scaled, biased and written.
#pragma once

#include "int4_codec.cuh"
#include "w4a8_stream_shape.cuh"

namespace slipstream {

__device__ __forceinline__ float4 load_from_cluster(uint32_t remote) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
  return v;
}

template <typename SHAPE, typename OUT>
struct W4a8Epilogue {
  const W4a8StreamParams& p;
  W4a8Memory<SHAPE> memory;
  const W4a8Share& share;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // sums of group i: rows l / 4 and l / 4 + 8 of the warp's strip, tokens 8 i + 2 (l % 4) + 0, 1.
  __device__ __forceinline__ void write(int pass, const float (&sums)[SHAPE::kSums]) const {
    const int first = share.pass_begin(pass), strips = share.pass_begin(pass + 1) - first;
    if (p.splits > 1) return exchange(first, strips, sums);
    if (warp >= strips) return;
#pragma unroll
    for (int i = 0; i < SHAPE::kColumns / 8; ++i) {
      if (8 * i < p.num_tokens) {
        write_group(first + warp, i, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
      }
    }
  }

 private:
  // All CTAs leave their sums in their own shared memory; each adds an equal part of all of them up.
  __device__ __forceinline__ void exchange(int first, int strips, const float (&sums)[SHAPE::kSums]) const {
    sync_threads(1, SHAPE::kConsumers);   // the ring has been read
#pragma unroll
    for (int i = 0; i < SHAPE::kColumns / 8; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(memory.exchange(warp, i) + lane * 16), "f"(sums[4 * i]),
                   "f"(sums[4 * i + 1]), "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3]) : "memory");
    }
    arrive_in_cluster();
    wait_for_cluster();
    const int num_groups = strips * ((p.num_tokens + 7) / 8);
#pragma unroll 1
    for (int group = share.rank + p.splits * warp; group < num_groups; group += p.splits * SHAPE::kStrips) {
      const uint32_t mine = memory.exchange(group % strips, group / strips) + lane * 16;
      float4 sum = {};
#pragma unroll 8
      for (int rank = 0; rank < p.splits; ++rank) {
        const float4 v = load_from_cluster(address_in(mine, rank));
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      write_group(first + group % strips, group / strips, sum);
    }
    arrive_in_cluster();   // no CTA ends while others may read from it
    wait_for_cluster();
  }

  __device__ __forceinline__ void write_group(int strip, int group, const float4& sum) const {
    const int token = 8 * group + 2 * (lane % 4);
    const float tokens[2] = {token_scale(token), token_scale(token + 1)};
    const float values[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * strip + lane / 4 + 8 * half;
      const float scale = __ldg(p.channel_scale + row);
      const float bias = p.bias != nullptr ? to_float(static_cast<const OUT*>(p.bias)[row]) : 0.0f;
      const float low = values[half][0] * tokens[0] * scale + bias, high = values[half][1] * tokens[1] * scale + bias;
      // Lane l now has token l / 4 and rows 2 (l % 4), + 1.
      const uint32_t pair = transpose_8x8(pack<OUT>(low, high));
      const int written = 8 * group + lane / 4;
      if (written < p.num_tokens) {
        OUT* out = static_cast<OUT*>(p.out) + int64_t{written} * p.out_features + 16 * strip + 8 * half + 2 * (lane % 4);
        *reinterpret_cast<uint32_t*>(out) = pair;
      }
    }
  }

  __device__ __forceinline__ float token_scale(int token) const {
    return token < p.num_tokens ? p.token_scale[token] : 0.0f;
  }
};

}  // namespace slipstream
