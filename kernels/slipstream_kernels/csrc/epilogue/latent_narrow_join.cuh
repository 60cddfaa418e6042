// latent_join.cuh for few rows: adds up the parts of a unit in the CTA that leaves the last of them, in the order of the
// keys, whoever is last, so that a launch repeats bit for bit.
#pragma once

#include "epilogue/latent_parts.cuh"
#include "mma/row_state.cuh"
#include "schedule/latent_shape.cuh"
#include "schedule/latent_work.cuh"

namespace slipstream {

// What one of the 256 threads that multiply has of a unit: NUM sums of MINE rows. Parts lie in memory as the threads hold
// them, which is one wide store after the other, and are added up by the threads that hold the same.
// ROWS: has row_of(h), the thread's row h, and mine(i), of which of them sum i is.
template <int NUM, int MINE, typename ROWS>
struct NarrowParts {
  using Shape = LatentShape;
  static constexpr int kThreads = kPartThreads;
  static constexpr int kQuads = NUM / 4;
  // Parts that are loaded at once, and how many quads of each.
  static constexpr int kTogether = 2, kBatch = kQuads % 8 == 0 ? 8 : kQuads;

  const LatentParams& p;
  const LatentWork& work;
  int thread;   // of both warpgroups that multiply

  // maxima: base 2. has_states: whether the thread is one of those that leave its rows' states.
  __device__ __forceinline__ void leave(const float (&sums)[NUM], const float (&maxima)[MINE], const float (&totals)[MINE],
                                        bool has_states) const {
    float4* to = reinterpret_cast<float4*>(p.partial_out) + place_of(work.slot);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      __stcg(to + i * kThreads, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    }
    if (!has_states) return;
#pragma unroll
    for (int h = 0; h < MINE; ++h) __stcg(state_of(work.slot, h), make_float2(maxima[h], totals[h]));
  }

  // sums, totals: of all parts.
  __device__ __forceinline__ void add_up(float (&sums)[NUM], float (&totals)[MINE]) const {
    float largest[MINE];
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
#pragma unroll
    for (int h = 0; h < MINE; ++h) largest[h] = kNothing, totals[h] = 0.0f;
#pragma unroll 1
    for (int part = 0; part < work.num_parts; part += kTogether) {
      float keep[MINE], weights[kTogether][MINE];
      weigh(part, largest, totals, keep, weights);
#pragma unroll
      for (int first = 0; first < kQuads; first += kBatch) {
        float4 values[kTogether][kBatch];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const float4* from = reinterpret_cast<const float4*>(p.partial_out) + place_of(slot_of(part + j));
#pragma unroll
          for (int i = 0; i < kBatch; ++i) values[j][i] = __ldcg(from + (first + i) * kThreads);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int at = 4 * (first + i) + k, h = ROWS::mine(at);
            sums[at] *= keep[h];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) sums[at] += (&values[j][i].x)[k] * weights[j][h];
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int64_t place_of(int slot) const {
    return static_cast<int64_t>(slot) * kThreads * kQuads + thread;
  }
  __device__ __forceinline__ float2* state_of(int slot, int h) const {
    return reinterpret_cast<float2*>(p.partial_state) + static_cast<int64_t>(slot) * Shape::kRows + ROWS::row_of(h);
  }
  __device__ __forceinline__ int slot_of(int part) const {
    return static_cast<int>(part_row(p, work.first_slot, min(part, work.num_parts - 1), 0) / Shape::kRows);
  }

  // Of kTogether parts from `part` on, their factors, and those of the sums so far.
  __device__ __forceinline__ void weigh(int part, float (&largest)[MINE], float (&totals)[MINE], float (&keep)[MINE],
                                        float (&weights)[kTogether][MINE]) const {
    float2 states[kTogether][MINE];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int h = 0; h < MINE; ++h) {
        states[j][h] = part + j < work.num_parts ? __ldcg(state_of(slot_of(part + j), h)) : make_float2(kNothing, 0.0f);
      }
    }
#pragma unroll
    for (int h = 0; h < MINE; ++h) {
      const float old = largest[h];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) largest[h] = fmaxf(largest[h], states[j][h].x);
      // A part or all so far have seen no key: -inf - -inf would be NaN.
      keep[h] = old == kNothing ? 0.0f : exp2_fast(old - largest[h]);
      totals[h] *= keep[h];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        weights[j][h] = states[j][h].x == kNothing ? 0.0f : exp2_fast(states[j][h].x - largest[h]);
        totals[h] += states[j][h].y * weights[j][h];
      }
    }
  }
};

}  // namespace slipstream
