// The sum of a small tensor over the GPUs of one host. Contract: comm/cuda/rank_sum.py.
//
// A rank stores what it has into the mailboxes of the others, and each 8 bytes travel in a line of 16 that holds the
// number of the sum twice: a reader that finds its number has the data too, so no barrier is waited for. Every rank sums
// all, after one trip over NVLink, or its part, which it then stores into the others' mailboxes: two trips, of less.
// Lines of two sums alternate, wherever they lie: earlier ones hold other numbers. A rank that has begun sum n + 2 has
// ended n + 1, for which it had data that needs all ranks to have begun it, which had all ended n: nobody reads the
// lines that it writes over.
// Added in the order of ranks, in fp32, so that every rank has the same bits. Built once per SLIPSTREAM_TYPE.

#include <cuda_runtime.h>

#include "formats/numbers.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "params/rank_sum_params.h"
#include "ptx/dependent_launch.cuh"
#include "ptx/memory_access.cuh"

namespace slipstream {

constexpr int kSumThreads = 256;
constexpr int kSumCtas = 264;   // two on each SM: all of them run at once

// Another GPU reads or writes a line at any time; halves of 8 bytes, data and number, come as a whole.
__device__ __forceinline__ void store_line(uint4* to, uint2 data, uint32_t number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%2};" ::"l"(to), "r"(data.x), "r"(number), "r"(data.y)
               : "memory");
}

__device__ __forceinline__ uint2 await_line(const uint4* from, uint32_t number) {
  uint4 v;
  do {
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  } while (v.y != number || v.w != number);
  return make_uint2(v.x, v.z);
}

// 8 bytes as fp32.
template <typename T>
struct Pack {
  static constexpr int kSize = 8 / sizeof(T);
  float values[kSize] = {};

  __device__ __forceinline__ void add(uint2 data) {
    if constexpr (kSize == 2) {
      values[0] += __uint_as_float(data.x);
      values[1] += __uint_as_float(data.y);
    } else {
      const uint32_t words[2] = {data.x, data.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] += to_float(reinterpret_cast<const T*>(words)[i]);
    }
  }

  __device__ __forceinline__ uint2 rounded() const {
    if constexpr (kSize == 2) {
      return make_uint2(__float_as_uint(values[0]), __float_as_uint(values[1]));
    } else {
      return make_uint2(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]));
    }
  }
};

__device__ __forceinline__ void end_sum(const RankSumParams& p, uint32_t number) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(p.counters + 1, 1u) + 1 < gridDim.x) return;
  p.counters[1] = 0;
  p.counters[0] = number;
}

// Pack i of this rank and what the others have stored at `lines`, `stride` lines of each rank.
template <typename T>
__device__ __forceinline__ uint2 sum_of(const RankSumParams& p, int64_t i, const uint4* lines, int64_t stride,
                                        uint32_t number) {
  const auto* partial = static_cast<const uint2*>(p.partial);
  Pack<T> sum;
  for (int rank = 0; rank < p.num_ranks; ++rank) {
    sum.add(rank == p.rank ? load_global_8(partial + i) : await_line(lines + rank * stride, number));
  }
  return sum.rounded();
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads) rank_sum_kernel(const RankSumParams p) {
  start_dependents();
  await_previous();
  const uint32_t number = *static_cast<volatile uint32_t*>(p.counters) + 1;
  const int64_t side = static_cast<int64_t>(number % 2) * p.side_lines;
  const auto* partial = static_cast<const uint2*>(p.partial);
  const int64_t first = blockIdx.x * kSumThreads + threadIdx.x, stride = gridDim.x * kSumThreads;
  for (int64_t i = first; i < p.num_packs; i += stride) {
    const uint2 own = load_global_8(partial + i);
    for (int other = 0; other < p.num_ranks; ++other) {
      if (other != p.rank) store_line(p.mailboxes[other] + side + p.rank * p.num_packs + i, own, number);
    }
  }
  for (int64_t i = first; i < p.num_packs; i += stride) {
    static_cast<uint2*>(p.total)[i] = sum_of<T>(p, i, p.mailboxes[p.rank] + side + i, p.num_packs, number);
  }
  end_sum(p, number);
}

// Of a side the first num_ranks * part lines are what ranks have of one's part, the others are sums.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) rank_sum_parts_kernel(const RankSumParams p) {
  start_dependents();
  await_previous();
  const uint32_t number = *static_cast<volatile uint32_t*>(p.counters) + 1;
  const int64_t side = static_cast<int64_t>(number % 2) * p.side_lines, sums = side + p.num_ranks * p.part;
  const auto* partial = static_cast<const uint2*>(p.partial);
  auto* total = static_cast<uint2*>(p.total);
  const uint32_t part = static_cast<uint32_t>(p.part), num_packs = static_cast<uint32_t>(p.num_packs);
  const uint32_t first = blockIdx.x * kSumThreads + threadIdx.x, stride = gridDim.x * kSumThreads;
  const uint32_t own_first = p.rank * part, own_end = min(own_first + part, num_packs);
  for (uint32_t i = first; i < num_packs; i += stride) {
    const uint32_t owner = i / part;
    if (owner == p.rank) continue;
    store_line(p.mailboxes[owner] + side + p.rank * part + (i - owner * part), load_global_8(partial + i), number);
  }
  for (uint32_t i = own_first + first; i < own_end; i += stride) {
    const uint2 sum = sum_of<T>(p, i, p.mailboxes[p.rank] + side + (i - own_first), part, number);
    for (int other = 0; other < p.num_ranks; ++other) {
      if (other != p.rank) store_line(p.mailboxes[other] + sums + i, sum, number);
    }
    total[i] = sum;
  }
  for (uint32_t i = first; i < num_packs; i += stride) {
    if (i / part != p.rank) total[i] = await_line(p.mailboxes[p.rank] + sums + i, number);
  }
  end_sum(p, number);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_rank_sum(const RankSumParams* params, void* stream) {
  using namespace slipstream;
  const int64_t lines = params->part == 0 ? params->num_ranks * params->num_packs
                                          : params->num_ranks * params->part + params->num_packs;
  if (params->num_ranks > kMaxRanks || lines > params->side_lines) return cudaErrorInvalidValue;
  const int64_t wanted = (params->num_packs + kSumThreads - 1) / kSumThreads;
  const int ctas = static_cast<int>(wanted < kSumCtas ? wanted : kSumCtas);
  const auto kernel = params->part == 0 ? rank_sum_kernel<SLIPSTREAM_TYPE> : rank_sum_parts_kernel<SLIPSTREAM_TYPE>;
  return launch_kernel(params->is_dependent != 0, dim3(ctas), kSumThreads, 0, static_cast<cudaStream_t>(stream), kernel,
                       *params);
}
