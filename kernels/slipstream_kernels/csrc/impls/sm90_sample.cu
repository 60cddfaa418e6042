// The second pass of sample: from what the first pass (sample/triton/sample.py) left of each row to one token.  A CTA a row.
// Contract: sample/sample.py.
//
// A filtered row: a floor that some 1,500 of its groups' largest logits reach, these groups' tokens from the floor up,
// the cuts of top-k and top-p among them by search, and the race of those that are left.  Filters that keep tokens
// below the floor are solved from the row itself, with the same search.  Built once per SLIPSTREAM_TYPE, the logits'.

#include <cuda_runtime.h>

#include "ptx/dependent_launch.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "sample/sample_candidates.cuh"
#include "sample/sample_row.cuh"

namespace slipstream {

struct RowSettings {
  float temperature, inverse_t, top_p, min_p;
  int top_k;

  // Off is 0, 1 and 0.
  __device__ __forceinline__ RowSettings(const SampleParams& p, int row) {
    temperature = p.temperature[row];
    // As Triton-lang divides: rows without filters are drawn by its second pass, too.
    asm("div.full.f32 %0, 0f3F800000, %1;" : "=f"(inverse_t) : "f"(temperature));
    const int k = p.top_k == nullptr ? 0 : p.top_k[row];
    top_k = k > 0 && k < p.vocab_size ? k : 0;
    top_p = p.top_p == nullptr ? 1.0f : p.top_p[row];
    min_p = p.min_p == nullptr ? 0.0f : p.min_p[row];
  }

  __device__ __forceinline__ bool filters() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
  __device__ __forceinline__ float lowest_z() const { return min_p > 0.0f ? logf(min_p) : -kInfinity; }
};

// Results of the first pass over a row's chunks; each warp reads all of them.
struct RowChunks {
  const float* maxima;
  const float* sums;
  const int32_t* winners;
  int num_chunks;

  __device__ __forceinline__ float maximum() const {
    float largest = -kInfinity;
    for (int i = threadIdx.x % 32; i < num_chunks; i += 32) largest = fmaxf(largest, maxima[i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    return largest;
  }

  // exp(z) of the whole row.
  __device__ __forceinline__ float mass(float maximum, float inverse_t) const {
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < num_chunks; i += 32) {
      if (maxima[i] > -kInfinity) sum += sums[i] * __expf((maxima[i] - maximum) * inverse_t);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    return sum;
  }

  __device__ __forceinline__ int greedy() const {
    uint64_t least = ~uint64_t{0};
    for (int i = threadIdx.x % 32; i < num_chunks; i += 32) {
      least = min(least, static_cast<uint64_t>(~ordered(maxima[i])) << 32 | static_cast<uint32_t>(winners[i]));
    }
    return static_cast<int>(least_over_warp(least));
  }

  // Picks the token of a row without filters, whose chunks have run their races.
  __device__ __forceinline__ int winner(float maximum, float inverse_t) const {
    uint64_t least = kNoRunner;
    for (int i = threadIdx.x % 32; i < num_chunks; i += 32) {
      if (maxima[i] > -kInfinity) {
        least = min(least, runner(sums[i] * __expf((maximum - maxima[i]) * inverse_t), winners[i]));
      }
    }
    return static_cast<int>(least_over_warp(least));
  }
};

// The largest key in [low, high] at or above which the weights (0: not there) reach target; low if none does.  Ends
// when one key is left between the borders: their tokens are counted on the way, with the same sum.
template <bool IS_COUNT>
__device__ __forceinline__ uint32_t find_cut(BlockSums& sums, const uint32_t (&keys)[kCandidatesPerThread],
                                             const uint64_t (&weights)[kCandidatesPerThread], uint32_t low,
                                             uint32_t high, uint64_t target) {
  const auto sum_from = [&](uint32_t key) {
    MassAndCount mine{0, 0};
#pragma unroll
    for (int i = 0; i < kCandidatesPerThread; ++i) {
      if (keys[i] < key || weights[i] == 0) continue;
      if (!IS_COUNT) mine.mass += weights[i];
      ++mine.count;
    }
    if (!IS_COUNT) return sums.add(mine);
    const uint32_t count = sums.count(mine.count);
    return MassAndCount{count, count};
  };
  const uint32_t first = low;
  MassAndCount of_low = sum_from(low);
  if (of_low.mass < target) return first;
  uint32_t low_count = of_low.count, high_count = 0;
  while (low < high && low_count - high_count > 1) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const MassAndCount found = sum_from(middle);
    if (found.mass >= target) low = middle, low_count = found.count;
    else high = middle - 1, high_count = found.count;
  }
  // The tokens of [low, high] share a key: it is the cut.
  uint64_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCandidatesPerThread; ++i) {
    if (weights[i] != 0 && keys[i] <= high) largest = max(largest, static_cast<uint64_t>(keys[i]));
  }
  return max(low, static_cast<uint32_t>(~sums.least(~largest)));
}

__device__ __forceinline__ uint64_t fixed_mass(float weight) { return __float2ull_rn(weight * kMassUnit); }

// Draws among the candidates; false if the filters may keep tokens that are not among them.
__device__ __forceinline__ bool draw_among(const Candidates& found, const RowSettings& row, const RowChunks& chunks,
                                           float maximum, const Race& race, BlockSums& sums, int& token_id) {
  uint32_t keys[kCandidatesPerThread], cut = ordered(found.floor);
  uint64_t weights[kCandidatesPerThread];
  const uint32_t highest = ordered(maximum);
  bool is_enough = found.floor == kLowestLogit, knows_total = found.floor <= maximum;
#pragma unroll
  for (int i = 0; i < kCandidatesPerThread; ++i) {
    keys[i] = ordered(found.x[i]);
    weights[i] = found.x[i] >= found.floor;
  }
  if (!knows_total) return false;
  if (row.top_k > 0) {
    is_enough = knows_total = is_enough || found.count >= static_cast<uint32_t>(row.top_k);
    cut = find_cut<true>(sums, keys, weights, cut, highest, row.top_k);
  }
  if (row.top_p < 1.0f) {
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kCandidatesPerThread; ++i) {
      const bool is_kept = weights[i] != 0 && keys[i] >= cut;
      weights[i] = is_kept ? fixed_mass(__expf((found.x[i] - maximum) * row.inverse_t)) : 0;
      mine += weights[i];
    }
    const uint64_t mass = sums.add(MassAndCount{mine, 0}).mass;
    const double total =
        row.top_k > 0 ? static_cast<double>(mass) : double{kMassUnit} * chunks.mass(maximum, row.inverse_t);
    const auto target = static_cast<uint64_t>(ceil(fmax(row.top_p * total, 0.0)));
    is_enough = is_enough || mass >= target;
    cut = find_cut<false>(sums, keys, weights, cut, highest, target);
  }
  const float lowest_z = row.lowest_z();
  is_enough = is_enough || (found.floor - maximum) * row.inverse_t <= lowest_z;
  uint64_t least = kNoRunner;
#pragma unroll
  for (int i = 0; i < kCandidatesPerThread; ++i) {
    const float z = (found.x[i] - maximum) * row.inverse_t;
    if (found.x[i] >= found.floor && keys[i] >= cut && z >= lowest_z) {
      least = min(least, runner(race.score(z, found.id[i]), found.id[i]));
    }
  }
  token_id = static_cast<int>(sums.least(least));
  return is_enough && knows_total;
}

template <typename T>
__device__ __forceinline__ int draw(const SampleParams& p, const RowChunks& chunks, SampleMemory& memory) {
  const int row = blockIdx.x;
  const RowSettings settings(p, row);
  if (settings.temperature <= 0.0f) return chunks.greedy();
  const float maximum = chunks.maximum();
  // A row of forbidden tokens only has no distribution: it stays greedy, as everywhere.
  if (maximum == -kInfinity) return 0;
  if (!settings.filters()) return chunks.winner(maximum, settings.inverse_t);
  BlockSums sums{memory.parts};
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  const T* group_maxima = static_cast<const T*>(p.group_maxima) + static_cast<int64_t>(row) * p.num_groups;
  const Race race(p.seeds[row], p.positions[row] + 1);
  const Candidates found = CandidateFinder<T>{p, logits, memory, sums}.find(group_maxima, maximum, settings.top_k);
  int token_id = 0;
  if (draw_among(found, settings, chunks, maximum, race, sums, token_id)) return token_id;
  RowSearch<T> search{logits, p.vocab_size, maximum, settings.inverse_t, sums};
  const uint32_t cut = search.find_cuts(settings.top_k, settings.top_p);
  return search.draw(cut, settings.lowest_z(), race);
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads, 1) sample_kernel(const SampleParams p) {
  start_dependents();
  await_previous();
  __shared__ SampleMemory memory;
  if (threadIdx.x == 0) memory.num_listed = memory.num_kept = 0;
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.num_chunks;
  const RowChunks chunks{p.maxima + first, p.sums + first, p.winners + first, p.num_chunks};
  const int token_id = draw<T>(p, chunks, memory);
  if (threadIdx.x == 0) p.token_ids[blockIdx.x] = min(token_id, p.vocab_size - 1);
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_sample(const SampleParams* params, void* stream) {
  using namespace slipstream;
  return launch_kernel(params->is_dependent != 0, dim3(params->num_rows), kSampleThreads, 0,
                       static_cast<cudaStream_t>(stream), sample_kernel<SLIPSTREAM_TYPE>, *params);
}
