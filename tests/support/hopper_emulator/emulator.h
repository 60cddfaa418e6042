// Runs CTAs of a Hopper kernel on a CPU, thread by thread: each CUDA thread is a fiber, warp operations, barriers and bulk
// copies are done as the hardware defines them. Headers of the same names as the thin ones of csrc/{ptx,mma} (warp_mma.cuh,
// hopper_copy.cuh, bulk_copy.cuh) put this in their place. Warps and CTAs advance in a random order and
// copies arrive late and in any order; a state in which nobody can go on ends the run. Memory is sequentially consistent
// here: missing fences between CTAs do not show.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#ifndef __forceinline__
#define __forceinline__ inline
#endif

namespace emulator {

struct Index {
  unsigned x;
};

struct Cta;

// Of cp.async: bytes of memory, or of zeros.
struct OwnCopy {
  char* to;
  const char* from;
  int bytes;
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  Cta* cta = nullptr;
  bool is_done = false;
  std::vector<std::vector<OwnCopy>> groups = {{}};   // of copies of its own, the last one not committed
  unsigned cluster_round = 0;                        // of its last arrival
};

// What the lanes of a warp bring to an operation, and take from it.
struct Exchange {
  alignas(16) char given[32][64], taken[32][64];
  int arrived = 0;
  unsigned round = 0;
};

struct NamedBarrier {
  int arrived = 0;
  unsigned round = 0;
};

struct Copy {
  char* to;
  const char* from;
  uint32_t bytes, barrier;
};

// As an mbarrier lies in shared memory.
struct MemoryBarrier {
  uint8_t expected, pending, phase, unused;
  int32_t bytes;
};

struct Cta {
  std::vector<char> shared;
  std::vector<Exchange> warps;
  NamedBarrier barriers[16];
  bool has_no = false;   // of __syncthreads_and
  std::vector<Copy> copies;
  NamedBarrier* cluster = nullptr;   // of all threads of its cluster
};

extern Fiber* current;
extern int num_ctas;             // of the launch
extern int cluster_size;         // CTAs
extern unsigned long progress;   // operations that ended: without any, nobody will ever go on

void yield();
[[noreturn]] void fail(const char* what);
int run(int num_ctas, int num_threads, int shared_bytes, unsigned seed, const std::function<void(char*)>& kernel,
        int cluster_size = 1);

inline char* shared(uint32_t address) { return current->cta->shared.data() + address; }

// Waits until the condition holds, while others run.
template <typename CONDITION>
void until(CONDITION condition) {
  while (!condition()) yield();
  ++progress;
}

// All 32 lanes: `combine` sees what each gave and fills what each takes.
template <typename GIVEN, typename TAKEN, typename COMBINE>
TAKEN together(const GIVEN& given, COMBINE combine) {
  static_assert(sizeof(GIVEN) <= 64 && sizeof(TAKEN) <= 64);
  const int lane = current->thread.x % 32;
  Exchange& exchange = current->cta->warps[current->thread.x / 32];
  std::memcpy(exchange.given[lane], &given, sizeof(GIVEN));
  const unsigned round = exchange.round;
  if (++exchange.arrived == 32) {
    GIVEN all[32];
    TAKEN results[32];
    for (int i = 0; i < 32; ++i) std::memcpy(&all[i], exchange.given[i], sizeof(GIVEN));
    combine(all, results);
    for (int i = 0; i < 32; ++i) std::memcpy(exchange.taken[i], &results[i], sizeof(TAKEN));
    exchange.arrived = 0;
    ++exchange.round;
    ++progress;
  } else {
    until([&] { return exchange.round != round; });
  }
  TAKEN taken;
  std::memcpy(&taken, exchange.taken[lane], sizeof(TAKEN));
  return taken;
}

inline void sync(int id, int count) {
  NamedBarrier& barrier = current->cta->barriers[id];
  const unsigned round = barrier.round;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.round;
    ++progress;
  } else {
    until([&] { return barrier.round != round; });
  }
}

// The same without waiting.
inline void arrive_at(int id, int count) {
  NamedBarrier& barrier = current->cta->barriers[id];
  if (++barrier.arrived < count) return;
  barrier.arrived = 0;
  ++barrier.round;
  ++progress;
}

inline void arrive_in_cluster() {
  NamedBarrier& barrier = *current->cta->cluster;
  current->cluster_round = barrier.round;
  if (++barrier.arrived < cluster_size * static_cast<int>(current->cta->warps.size()) * 32) return;
  barrier.arrived = 0;
  ++barrier.round;
  ++progress;
}
inline void wait_for_cluster() {
  until([] { return current->cta->cluster->round != current->cluster_round; });
}

// Of another CTA of the cluster, whose rank stands above the bits of its own address.
constexpr int kRankBit = 24;
inline char* shared_in_cluster(uint32_t remote) {
  Cta* first = current->cta - current->block.x % cluster_size;
  return first[remote >> kRankBit].shared.data() + (remote & ((1u << kRankBit) - 1));
}

inline MemoryBarrier& memory_barrier(uint32_t address) { return *reinterpret_cast<MemoryBarrier*>(shared(address)); }

inline void settle(MemoryBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define gridDim (emulator::Index{static_cast<unsigned>(emulator::num_ctas)})

// What nvcc knows without a header.
inline void __syncthreads() { emulator::sync(0, static_cast<int>(emulator::current->cta->warps.size()) * 32); }
inline int __syncthreads_and(int value) {
  emulator::Cta& cta = *emulator::current->cta;
  cta.has_no |= value == 0;
  __syncthreads();
  const int all = !cta.has_no;
  __syncthreads();
  cta.has_no = false;
  __syncthreads();
  return all;
}
inline void __threadfence() {}
inline void __syncwarp() {
  emulator::together<int, int>(0, [](const int*, int* taken) { for (int i = 0; i < 32; ++i) taken[i] = 0; });
}
template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  struct Given { T value; int source; };
  return emulator::together<Given, T>({value, source}, [](const Given* given, T* taken) {
    for (int i = 0; i < 32; ++i) taken[i] = given[given[i].source % 32].value;
  });
}
inline int __any_sync(unsigned, int value) {
  return emulator::together<int, int>(value, [](const int* given, int* taken) {
    int any = 0;
    for (int i = 0; i < 32; ++i) any |= given[i] != 0;
    for (int i = 0; i < 32; ++i) taken[i] = any;
  });
}
inline unsigned __ballot_sync(unsigned, int value) {
  return emulator::together<int, unsigned>(value, [](const int* given, unsigned* taken) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(given[i] != 0) << i;
    for (int i = 0; i < 32; ++i) taken[i] = bits;
  });
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ distance);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}
using std::max;
using std::min;
template <typename T>
T __ldg(const T* from) { return *from; }
template <typename T>
T __ldcg(const T* from) { return *from; }
template <typename T>
void __stcg(T* to, const T& value) { *to = value; }
template <typename T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
template <typename T>
T atomicExch(T* to, T value) {
  const T before = *to;
  *to = value;
  return before;
}
inline unsigned atomicInc(unsigned* to, unsigned last) {
  const unsigned before = *to;
  *to = before >= last ? 0 : before + 1;
  return before;
}
inline void __nanosleep(unsigned) { emulator::yield(); }
inline int64_t clock64() { return static_cast<int64_t>(emulator::progress); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a & 0xffffu, b & 0xffffu) | std::max(a >> 16, b >> 16) << 16;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __expf(float x) { return std::exp(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
