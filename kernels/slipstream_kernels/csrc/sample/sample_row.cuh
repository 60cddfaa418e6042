// The same search among all tokens of a row: for filters that keep more than the candidates.  Reads the row up to 16
// times a cut.
#pragma once

#include "sample/sample_race.cuh"
#include "sample/sample_sums.cuh"

namespace slipstream {

template <typename T>
struct RowSearch {
  const T* row;
  int vocab_size;
  float maximum, inverse_t;
  BlockSums& sums;

  // The lowest key that top-k, then top-p, keep.
  __device__ __forceinline__ uint32_t find_cuts(int top_k, float top_p) {
    uint32_t cut = 0;
    if (top_k > 0) cut = find_cut<true>(cut, top_k);
    if (top_p < 1.0f) {
      const uint32_t unused[3] = {cut, cut, cut};
      double mass[3];
      sum_from<false>(cut, unused, mass);
      cut = find_cut<false>(cut, top_p * mass[0]);
    }
    return cut;
  }

  __device__ __forceinline__ int draw(uint32_t cut, float lowest_z, const Race& race) {
    uint64_t least = kNoRunner;
#pragma unroll 4
    for (int id = threadIdx.x; id < vocab_size; id += kSampleThreads) {
      const float x = logit(row[id]), z = (x - maximum) * inverse_t;
      if (ordered(x) >= cut && z >= lowest_z && x > -kInfinity) least = min(least, runner(race.score(z, id), id));
    }
    return static_cast<int>(sums.least(least));
  }

 private:
  // By quarters.
  template <bool IS_COUNT>
  __device__ __forceinline__ uint32_t find_cut(uint32_t floor, double target) {
    uint32_t low = floor, high = ordered(maximum);
#pragma unroll 1
    while (low < high) {
      const uint32_t step = (high - low + 3) / 4, keys[3] = {low + step, low + 2 * step, low + 3 * step};
      double masses[3];
      sum_from<IS_COUNT>(floor, keys, masses);
      uint32_t reached = 0;
#pragma unroll
      for (int i = 0; i < 3; ++i) reached += masses[i] >= target && keys[i] <= high;
      low += step * reached;
      high = min(high, low + (step - 1));
    }
    return low;
  }

  // How many tokens (IS_COUNT) or how much exp(z) lies at or above floor and each of three keys.
  template <bool IS_COUNT>
  __device__ __forceinline__ void sum_from(uint32_t floor, const uint32_t (&keys)[3], double (&masses)[3]) {
    double mine[3] = {0.0, 0.0, 0.0};
#pragma unroll 8
    for (int id = threadIdx.x; id < vocab_size; id += kSampleThreads) {
      const float x = logit(row[id]);
      const uint32_t key = ordered(x);
      if (key < floor) continue;
      const float weight = IS_COUNT ? 1.0f : __expf((x - maximum) * inverse_t);
#pragma unroll
      for (int i = 0; i < 3; ++i) mine[i] += key >= keys[i] ? weight : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) masses[i] = sums.add(mine[i]);
  }
};

}  // namespace slipstream
