// The sum of a small tensor over the GPUs of one host. Contract: comm/cuda/rank_sum.py.
//
// A rank stores what it has into the mailboxes of the others, in lines that hold the number of the sum beside the data: a
// reader that finds its number has the data too, so no barrier is waited for. Every rank sums all, after one trip over the
// links, or its part, which it then stores into the others' mailboxes: two trips, of less.
// Lines of two sums alternate, wherever they lie: earlier ones hold other numbers. Numbers have 32 bits and begin again, after
// days: lines that were never written hold a number of the other side's kind (clear_mailbox), and a line of the sum 2^32
// before would have to be untouched since, and read by just this sum. A rank that has begun sum n + 2 has
// ended n + 1, for which it had data that needs all ranks to have begun it, which had all ended n: nobody reads the
// lines that it writes over. Lines of either size have a mailbox of their own: where one has its number, the other has data.
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

__device__ __forceinline__ void store_unit(uint4* to, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 load_unit(const uint4* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
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

// A unit is what a thread moves at once, 16 bytes of a line. How a line of one unit is made: another GPU reads or writes it at
// any time, and halves of 8 bytes, data and number, come as a whole.
struct ShortLines {
  uint32_t number;
  static constexpr int kPacks = 1;   // of a unit

  static __device__ __forceinline__ bool is_data(int64_t, int) { return true; }
  static __device__ __forceinline__ int64_t pack_of(int64_t unit) { return unit; }

  __device__ __forceinline__ void send(uint4* to, const uint2 (&data)[1]) const {
    store_unit(to, make_uint4(data[0].x, number, data[0].y, number));
  }

  __device__ __forceinline__ void receive(const uint4* from, bool is_inside, uint2 (&data)[1]) const {
    uint4 v{};
    if (is_inside) do v = load_unit(from); while (v.y != number || v.w != number);
    data[0] = make_uint2(v.x, v.z);
  }
};

// A line of eight units, 15 packs and the number: of 128 bytes that eight lanes store at once, NVLink delivers all or none, as
// NCCL's LL128 protocol relies on. 1.07 times the data's bytes instead of twice. All lanes of a warp take part.
struct WideLines {
  uint32_t number;
  static constexpr int kPacks = 2;

  static __device__ __forceinline__ bool is_data(int64_t unit, int pack) { return pack == 0 || unit % 8 != 7; }
  static __device__ __forceinline__ int64_t pack_of(int64_t unit) { return unit / 8 * 15 + unit % 8 * 2; }

  __device__ __forceinline__ void send(uint4* to, const uint2 (&data)[2]) const {
    const bool is_last = threadIdx.x % 8 == 7;
    store_unit(to, make_uint4(data[0].x, data[0].y, is_last ? number : data[1].x, is_last ? number : data[1].y));
  }

  __device__ __forceinline__ void receive(const uint4* from, bool is_inside, uint2 (&data)[2]) const {
    const bool is_last = is_inside && threadIdx.x % 8 == 7;
    uint4 v{};
    do {
      if (is_inside) v = load_unit(from);
    } while (__any_sync(~0u, is_last && (v.z != number || v.w != number)));
    data[0] = make_uint2(v.x, v.y), data[1] = make_uint2(v.z, v.w);
  }
};

// What a thread does with unit i of the tensor; units of a line have neighbouring lanes, also where a line is part of the
// tensor only: data beyond its end are zeros.
template <typename LINES>
struct RankUnits {
  static constexpr int kPacks = LINES::kPacks;
  const RankSumParams& p;
  LINES lines;

  __device__ __forceinline__ bool has(int64_t i, int pack) const {
    return i < p.num_units && LINES::is_data(i, pack) && LINES::pack_of(i) + pack < p.num_packs;
  }

  __device__ __forceinline__ void load_own(int64_t i, uint2 (&data)[kPacks]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const bool is_there = has(i, pack);
      data[pack] = is_there ? load_global_8(static_cast<const uint2*>(p.partial) + LINES::pack_of(i) + pack) : uint2{};
    }
  }

  __device__ __forceinline__ void write(int64_t i, const uint2 (&data)[kPacks]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (has(i, pack)) static_cast<uint2*>(p.total)[LINES::pack_of(i) + pack] = data[pack];
    }
  }

  // To the mailboxes of all others.
  __device__ __forceinline__ void send(int64_t i, int64_t place, const uint2 (&data)[kPacks]) const {
    if (i >= p.num_units) return;
    for (int other = 0; other < p.num_ranks; ++other) {
      if (other != p.rank) lines.send(p.mailboxes[other] + place, data);
    }
  }

  // Sums what this rank has and what the others have stored for it at `place`, `stride` units of each rank.
  template <typename T>
  __device__ __forceinline__ void sum(int64_t i, int64_t place, int64_t stride, uint2 (&data)[kPacks]) const {
    Pack<T> sums[kPacks];
    for (int rank = 0; rank < p.num_ranks; ++rank) {
      if (rank == p.rank) load_own(i, data);
      else lines.receive(p.mailboxes[p.rank] + place + rank * stride, i < p.num_units, data);
#pragma unroll
      for (int pack = 0; pack < kPacks; ++pack) sums[pack].add(data[pack]);
    }
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) data[pack] = sums[pack].rounded();
  }
};

__device__ __forceinline__ void end_sum(const RankSumParams& p, uint32_t number) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(p.counters + 1, 1u) + 1 < gridDim.x) return;
  p.counters[1] = 0;
  p.counters[0] = number;
}

// Threads of a warp go round together: `end` is rounded up to its 32.
__device__ __forceinline__ int64_t whole_warps(int64_t units) { return (units + 31) / 32 * 32; }

template <typename T, typename LINES>
__global__ void __launch_bounds__(kSumThreads) rank_sum_kernel(const RankSumParams p) {
  start_dependents();
  await_previous();
  const uint32_t number = *static_cast<volatile uint32_t*>(p.counters) + 1;
  const int64_t side = static_cast<int64_t>(number % 2) * p.side_units, end = whole_warps(p.num_units);
  const int64_t first = blockIdx.x * kSumThreads + threadIdx.x, stride = gridDim.x * kSumThreads;
  const RankUnits<LINES> units{p, {number}};
  uint2 data[LINES::kPacks];
  for (int64_t i = first; i < end; i += stride) {
    units.load_own(i, data);
    units.send(i, side + p.rank * p.num_units + i, data);
  }
  for (int64_t i = first; i < end; i += stride) {
    units.template sum<T>(i, side + i, p.num_units, data);
    units.write(i, data);
  }
  end_sum(p, number);
}

// The first num_ranks * part units of a side are what each rank has of the receiver's part; the others are sums. A part is a
// multiple of a warp's units.
template <typename T, typename LINES>
__global__ void __launch_bounds__(kSumThreads) rank_sum_parts_kernel(const RankSumParams p) {
  start_dependents();
  await_previous();
  const uint32_t number = *static_cast<volatile uint32_t*>(p.counters) + 1;
  const int64_t side = static_cast<int64_t>(number % 2) * p.side_units, sums = side + p.num_ranks * p.part;
  const uint32_t part = static_cast<uint32_t>(p.part), end = static_cast<uint32_t>(whole_warps(p.num_units));
  const uint32_t first = blockIdx.x * kSumThreads + threadIdx.x, stride = gridDim.x * kSumThreads;
  const uint32_t own_first = p.rank * part, own_end = min(own_first + part, end);
  const RankUnits<LINES> units{p, {number}};
  uint2 data[LINES::kPacks];
  for (uint32_t i = first; i < end; i += stride) {
    const uint32_t owner = i / part;
    if (owner == p.rank) continue;
    units.load_own(i, data);
    if (i < p.num_units) units.lines.send(p.mailboxes[owner] + side + p.rank * part + (i - owner * part), data);
  }
  for (uint32_t i = own_first + first; i < own_end; i += stride) {
    units.template sum<T>(i, side + (i - own_first), part, data);
    units.send(i, sums + i, data);
    units.write(i, data);
  }
  for (uint32_t i = first; i < end; i += stride) {
    if (i / part == p.rank) continue;
    units.lines.receive(p.mailboxes[p.rank] + sums + i, i < p.num_units, data);
    units.write(i, data);
  }
  end_sum(p, number);
}

template <typename LINES>
cudaError_t launch(const RankSumParams& params, cudaStream_t stream) {
  const int64_t wanted = (params.num_units + kSumThreads - 1) / kSumThreads;
  const int ctas = static_cast<int>(wanted < kSumCtas ? wanted : kSumCtas);
  const auto kernel =
      params.part == 0 ? rank_sum_kernel<SLIPSTREAM_TYPE, LINES> : rank_sum_parts_kernel<SLIPSTREAM_TYPE, LINES>;
  return launch_kernel(params.is_dependent != 0, dim3(ctas), kSumThreads, 0, stream, kernel, params);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_rank_sum(const RankSumParams* params, void* stream) {
  using namespace slipstream;
  const int64_t units = params->part == 0 ? params->num_ranks * params->num_units
                                          : params->num_ranks * params->part + params->num_units;
  if (params->num_ranks > kMaxRanks || units > params->side_units || params->part % 32 != 0) return cudaErrorInvalidValue;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return params->is_wide != 0 ? launch<WideLines>(*params, cuda_stream)
                              : launch<ShortLines>(*params, cuda_stream);
}

// Whether NVLink joins two GPUs of this process: its copies of 128 bytes come as a whole. 1, 0, or a negative cudaError_t.
SLIPSTREAM_API int slipstream_are_linked(int device, int other) {
  int is_atomic = 0;
  const cudaError_t error = cudaDeviceGetP2PAttribute(&is_atomic, cudaDevP2PAttrNativeAtomicSupported, device, other);
  return error == cudaSuccess ? is_atomic : -static_cast<int>(error);
}
