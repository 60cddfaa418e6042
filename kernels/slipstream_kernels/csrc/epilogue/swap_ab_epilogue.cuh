// The end of a pass: the CTAs of a cluster send each other their partial sums (split-K), then each scales, biases, gates,
// transposes and writes the sums of its tokens.
#pragma once

#include "mma/swap_ab_multiply.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

template <typename SHAPE>
struct SwapAbEpilogue {
  using T = typename SHAPE::Output;
  const SwapAbParams& p;
  const SwapAbMemory<SHAPE> memory;
  const SwapAbWork<SHAPE> work;
  const int warpgroup;
  float weight_scales[SHAPE::kTiles][2], biases[SHAPE::kTiles][2];

  // Loads scales and bias of a pass's rows; they do not depend on the kernel before.
  __device__ __forceinline__ void load_constants(const WorkRange& units) {
#pragma unroll
    for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
      const int unit = min(units.begin + unit_in_pass<SHAPE>(tile, warpgroup), p.num_units - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = weight_row<SHAPE>(p, unit, half);
        weight_scales[tile][half] =
            SHAPE::Format::kIsScaled && !SHAPE::Format::kIsByBlocks ? __ldg(p.scale + row) : 1.0f;
        biases[tile][half] = p.bias == nullptr ? 0.0f : to_float(static_cast<const T*>(p.bias)[row]);
      }
    }
  }

  // Loads scales of tokens to shared memory; by all consumers, after the kernel before has ended.
  __device__ __forceinline__ void load_token_scales() const {
    if constexpr (SHAPE::Format::kIsScaled && !SHAPE::Format::kIsByBlocks) {
      const int token = threadIdx.x - 128;
      if (token < SHAPE::kColumns) {
        const float scale = token < p.num_tokens ? p.x_scale[token] : 0.0f;
        store_shared_4(memory.token_scales() + 4 * token, scale);
      }
      sync_threads(1, SHAPE::kConsumerThreads);
    }
  }

  // Announces the bytes that the other CTAs will send; by one thread.
  __device__ __forceinline__ void expect_partial_sums() const {
    if constexpr (SHAPE::kSplits > 1) arrive_expecting(memory.received(), SHAPE::kExchangeBytes);
  }

  __device__ __forceinline__ void write(const WorkRange& units, const SwapAbSums<SHAPE>& sums) const {
    if constexpr (SHAPE::kSplits == 1) {
#pragma unroll
      for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
#pragma unroll
        for (int group = 0; group < SHAPE::kGroups; ++group) finish(units, tile, group, partial_sum(sums, tile, group));
      }
    } else {
      float own[SHAPE::kTiles][SHAPE::kOwnGroups][4];
      send_partial_sums(sums, own);
      wait_barrier_of_cluster(memory.received(), 0);   // a cluster with splits has one pass
      add_partial_sums(units, own);
    }
  }

 private:
  struct PartialSum {
    float v[4];
  };

  static __device__ __forceinline__ PartialSum partial_sum(const SwapAbSums<SHAPE>& sums, int tile, int group) {
    const float* from = &sums.of[tile * SHAPE::kHalves + group / SHAPE::kBlockGroups]
                                [group % SHAPE::kBlockGroups * 4];
    return PartialSum{{from[0], from[1], from[2], from[3]}};
  }

  // Rank q of the cluster finishes the tokens [q, q + 1) kOwnGroups * 8. A thread receives the partial sums of the threads
  // with its index in the other CTAs: [source, without oneself][tile][group][thread].
  __device__ __forceinline__ uint32_t exchange_address(int source, int tile, int group) const {
    const int slot = (source * SHAPE::kTiles + tile) * SHAPE::kOwnGroups + group;
    return memory.exchange() + (slot * SHAPE::kConsumerThreads + threadIdx.x - 128) * 16;
  }

  __device__ __forceinline__ void send_partial_sums(const SwapAbSums<SHAPE>& sums,
                                                    float (&own)[SHAPE::kTiles][SHAPE::kOwnGroups][4]) const {
#pragma unroll
    for (int to = 0; to < SHAPE::kSplits; ++to) {
      const int source = work.rank < to ? work.rank : work.rank - 1;
      const uint32_t barrier = address_in(memory.received(), to);
#pragma unroll
      for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
#pragma unroll
        for (int group = 0; group < SHAPE::kOwnGroups; ++group) {
          const PartialSum sum = partial_sum(sums, tile, to * SHAPE::kOwnGroups + group);
          if (to == work.rank) {
#pragma unroll
            for (int i = 0; i < 4; ++i) own[tile][group][i] = sum.v[i];
          } else {
            send(address_in(exchange_address(source, tile, group), to), sum.v, barrier);
          }
        }
      }
    }
  }

  // Adds in the order of the ranks, the same in every CTA.
  __device__ __forceinline__ void add_partial_sums(const WorkRange& units,
                                                   const float (&own)[SHAPE::kTiles][SHAPE::kOwnGroups][4]) const {
#pragma unroll
    for (int tile = 0; tile < SHAPE::kTiles; ++tile) {
#pragma unroll
      for (int group = 0; group < SHAPE::kOwnGroups; ++group) {
        PartialSum sum = {};
#pragma unroll
        for (int rank = 0; rank < SHAPE::kSplits; ++rank) {
          float partial[4] = {own[tile][group][0], own[tile][group][1], own[tile][group][2], own[tile][group][3]};
          if (rank != work.rank) load_partial_sum(exchange_address(rank < work.rank ? rank : rank - 1, tile, group), partial);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum.v[i] += partial[i];
        }
        finish(units, tile, work.rank * SHAPE::kOwnGroups + group, sum);
      }
    }
  }

  static __device__ __forceinline__ void load_partial_sum(uint32_t from, float (&v)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from) : "memory");
  }

  // 16 weight rows (a warp's unit) of 8 tokens.
  __device__ __forceinline__ void finish(const WorkRange& units, int tile, int group, PartialSum sum) const {
    const int unit = units.begin + unit_in_pass<SHAPE>(tile, warpgroup);
    if (unit >= units.end || 8 * group >= p.num_tokens) return;
    float token_scales[2] = {1.0f, 1.0f};
    if constexpr (SHAPE::Format::kIsScaled && !SHAPE::Format::kIsByBlocks) {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(token_scales[0]), "=f"(token_scales[1])
                   : "r"(memory.token_scales() + 4 * (8 * group + threadIdx.x % 4 * 2)));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum.v[i] = sum.v[i] * (token_scales[i % 2] * weight_scales[tile][i / 2]) + biases[tile][i / 2];
    }
    const int token = 8 * group + threadIdx.x % 32 / 4;
    T* out = static_cast<T*>(p.out) + token * p.out_row_stride + threadIdx.x % 4 * 2;
    if constexpr (SHAPE::kIsGated) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum.v[i] = silu(sum.v[i]) * sum.v[i + 2];
      const uint32_t pair = transpose_8x8(pack<T>(sum.v[0], sum.v[1]));
      if (token < p.num_tokens) *reinterpret_cast<uint32_t*>(out + 8 * unit) = pair;
    } else {
      const uint32_t low = transpose_8x8(pack<T>(sum.v[0], sum.v[1]));
      const uint32_t high = transpose_8x8(pack<T>(sum.v[2], sum.v[3]));
      if (token >= p.num_tokens) return;
      *reinterpret_cast<uint32_t*>(out + 16 * unit) = low;
      *reinterpret_cast<uint32_t*>(out + 16 * unit + 8) = high;
    }
  }
};

}  // namespace slipstream
