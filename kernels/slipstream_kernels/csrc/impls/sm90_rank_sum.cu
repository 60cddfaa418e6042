// The sum of a small tensor over the GPUs of one host. Contract: comm/cuda/rank_sum.py.
//
// Each rank stores what it has into a mailbox of every other rank, and each 8 bytes travel in a line of 16 that holds the
// number of the sum twice: a reader that finds its number has the data too, so no barrier is waited for, and a sum takes
// one trip over NVLink. Lines of two sums alternate. A rank that has begun sum n + 2 has ended n + 1, for which it had
// data of all ranks, which had all ended n: nobody reads the lines that it writes over.
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

template <typename T>
__global__ void __launch_bounds__(kSumThreads) rank_sum_kernel(const RankSumParams p) {
  start_dependents();
  await_previous();
  const uint32_t number = *static_cast<volatile uint32_t*>(p.counters) + 1;
  const int64_t side = static_cast<int64_t>(number % 2) * p.num_ranks;
  const auto* partial = static_cast<const uint2*>(p.partial);
  const int64_t first = blockIdx.x * kSumThreads + threadIdx.x, stride = gridDim.x * kSumThreads;
  for (int64_t i = first; i < p.num_packs; i += stride) {
    const uint2 own = load_global_8(partial + i);
    for (int other = 0; other < p.num_ranks; ++other) {
      if (other != p.rank) store_line(p.mailboxes[other] + (side + p.rank) * p.capacity + i, own, number);
    }
  }
  for (int64_t i = first; i < p.num_packs; i += stride) {
    Pack<T> sum;
    for (int rank = 0; rank < p.num_ranks; ++rank) {
      sum.add(rank == p.rank ? load_global_8(partial + i)
                             : await_line(p.mailboxes[p.rank] + (side + rank) * p.capacity + i, number));
    }
    static_cast<uint2*>(p.total)[i] = sum.rounded();
  }
  end_sum(p, number);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_rank_sum(const RankSumParams* params, void* stream) {
  using namespace slipstream;
  if (params->num_ranks > kMaxRanks || params->num_packs > params->capacity) return cudaErrorInvalidValue;
  const int64_t wanted = (params->num_packs + kSumThreads - 1) / kSumThreads;
  const int ctas = static_cast<int>(wanted < kSumCtas ? wanted : kSumCtas);
  return launch_kernel(params->is_dependent != 0, dim3(ctas), kSumThreads, 0, static_cast<cudaStream_t>(stream),
                       rank_sum_kernel<SLIPSTREAM_TYPE>, *params);
}
