// A row's largest tokens: the groups whose largest logit reaches a floor, and these groups' tokens from the floor up.
#pragma once

#include "params/sample_params.h"
#include "ptx/warp_scan.cuh"
#include "sample/sample_race.cuh"
#include "sample/sample_sums.cuh"

namespace slipstream {

constexpr int kMaxGroups = 16384;   // as sample/triton/token_groups.py
constexpr int kMaxCandidates = 2048;
constexpr int kKeysPerThread = kMaxGroups / kSampleThreads;
constexpr int kUnitTokens = 8;      // read at once by a thread
constexpr int kUnitsPerThread = kMaxCandidates / kSampleThreads;
constexpr int kCandidatesPerThread = kMaxCandidates / kSampleThreads;

struct SampleMemory {
  MassAndCount parts[2][kSampleWarps];
  uint32_t num_listed, num_kept;
  int groups[kMaxCandidates];
  int ids[kMaxCandidates];
  float logits[kMaxCandidates];
};

// floor: every token from it up is among the candidates; kLowestLogit: every possible token; infinity: none.
struct Candidates {
  float x[kCandidatesPerThread];
  int id[kCandidatesPerThread];
  float floor;
  uint32_t count;
};

// All threads: room for each one's `mine` items behind those of the others, in any order.
__device__ __forceinline__ uint32_t take_places(uint32_t* counter, uint32_t mine) {
  const int lane = threadIdx.x % 32;
  const uint32_t up_to = inclusive_sum(mine);
  uint32_t first = 0;
  if (lane == 31 && up_to > 0) first = atomicAdd(counter, up_to);
  return __shfl_sync(kAllLanes, first, 31) + up_to - mine;
}

template <typename T>
struct CandidateFinder {
  const SampleParams& p;
  const T* row;
  SampleMemory& memory;
  BlockSums& sums;
  uint32_t keys[kKeysPerThread];  // of the groups' largest; 0 where there is none

  __device__ __forceinline__ Candidates find(const T* group_maxima, float maximum, int top_k) {
    load_keys(group_maxima);
    uint32_t possible = 0;
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) possible += keys[i] > kMinusInfinityKey;
    const uint32_t num_possible = sums.count(possible), wanted = p.most * 7 / 8;
    // k groups from the floor up have k tokens from the floor up: where the k-th largest is, nothing below matters.
    const uint32_t enough = top_k > 0 && top_k < wanted ? top_k : wanted;
    uint32_t num_reaching = 0;
    const uint32_t key = find_floor(ordered(maximum), min(enough, num_possible), num_reaching);
    list_groups(key);
    __syncthreads();
    Candidates found;
    found.floor = num_reaching >= num_possible ? kLowestLogit : unordered(key);
    pack_tokens(num_reaching, found.floor);
    __syncthreads();
    found.count = memory.num_kept;
    if (found.count > kMaxCandidates) found.floor = kInfinity;
    collect(found);
    return found;
  }

 private:
  __device__ __forceinline__ void load_keys(const T* group_maxima) {
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) {
      const int group = i * kSampleThreads + threadIdx.x;
      keys[i] = group < p.num_groups ? ordered(logit(group_maxima[group])) : 0;
    }
  }

  // The lowest floor found that at least `enough` groups and at most p.most reach, and how many do; see
  // token_groups.py: down from the top by doubled steps until too many reach, then by halves.
  __device__ __forceinline__ uint32_t find_floor(uint32_t highest, uint32_t enough, uint32_t& num_reaching) {
    uint32_t low = kMinusInfinityKey, high = highest + 1, step = 1u << 22;
    while (high - low > 1 && num_reaching < enough) {
      const uint32_t distance = high - low, middle = distance > step ? high - step : low + distance / 2;
      uint32_t reaching = 0;
#pragma unroll
      for (int i = 0; i < kKeysPerThread; ++i) reaching += keys[i] >= middle;
      const uint32_t count = sums.count(reaching);
      const bool fits = count <= static_cast<uint32_t>(p.most);
      step = fits && step < 0x80000000u ? step * 2 : ~0u;
      if (fits) num_reaching = count, high = middle;
      else low = middle;
    }
    return high;
  }

  __device__ __forceinline__ void list_groups(uint32_t key) {
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) mine += keys[i] >= key;
    uint32_t place = take_places(&memory.num_listed, mine);
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) {
      if (keys[i] >= key) memory.groups[place++] = i * kSampleThreads + threadIdx.x;
    }
  }

  // Eight neighbouring tokens, by loads of 16 bytes but at the end of the row; -inf past it.
  __device__ __forceinline__ void load_unit(int first, float (&x)[kUnitTokens]) const {
    if (first + kUnitTokens <= p.vocab_size) {
      constexpr int kParts = kUnitTokens * sizeof(T) / 16;
      uint4 raw[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) raw[i] = reinterpret_cast<const uint4*>(row + first)[i];
#pragma unroll
      for (int i = 0; i < kUnitTokens; ++i) x[i] = logit(reinterpret_cast<const T*>(raw)[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kUnitTokens; ++i) x[i] = first + i < p.vocab_size ? logit(row[first + i]) : -kInfinity;
  }

  __device__ __forceinline__ void pack_tokens(uint32_t num_groups, float floor) {
    const int units_log2 = p.group_log2 - 3, num_units = num_groups << units_log2;
    float x[kUnitsPerThread][kUnitTokens];
    int first[kUnitsPerThread];
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      const int unit = i * kSampleThreads + threadIdx.x;
      first[i] = p.vocab_size;
      if (unit < num_units) {
        const int part = unit & ((1 << units_log2) - 1);
        first[i] = ((memory.groups[unit >> units_log2] << units_log2) + part) * kUnitTokens;
      }
      load_unit(first[i], x[i]);
    }
#pragma unroll
    for (int i = 0; i < kUnitsPerThread * kUnitTokens; ++i) mine += x[i / kUnitTokens][i % kUnitTokens] >= floor;
    uint32_t place = take_places(&memory.num_kept, mine);
#pragma unroll
    for (int i = 0; i < kUnitsPerThread * kUnitTokens; ++i) {
      const float value = x[i / kUnitTokens][i % kUnitTokens];
      if (value >= floor && place < kMaxCandidates) {
        memory.ids[place] = first[i / kUnitTokens] + i % kUnitTokens;
        memory.logits[place] = value;
      }
      place += value >= floor;
    }
  }

  __device__ __forceinline__ void collect(Candidates& found) const {
#pragma unroll
    for (int i = 0; i < kCandidatesPerThread; ++i) {
      const uint32_t place = i * kSampleThreads + threadIdx.x;
      const bool is_there = place < found.count;
      found.x[i] = is_there ? memory.logits[place] : -kInfinity;
      found.id[i] = is_there ? memory.ids[place] : 0x7FFFFFFF;
    }
  }
};

}  // namespace slipstream
