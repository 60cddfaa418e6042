// Scores of a warpgroup's 64 rows before their softmax (row_state.cuh): soft cap, ALiBi, mask.
#pragma once

#include "params/prefill_params.h"
#include "schedule/prefill_work.cuh"
#include "mma/row_state.cuh"

namespace slipstream {

// Row, position, ALiBi slope and scale of a thread's two rows.
struct RowFacts {
  int row[2];        // of the tile
  int position[2];   // of its query; at or past the sequence's end for rows that do not exist
  float slope[2];    // ALiBi, base 2
  float factor[2];   // of raw products, base 2: the scale, the cache's of a head, that of rounded queries

  template <bool HAS_ALIBI>
  __device__ __forceinline__ void load(const PrefillParams& p, const Work& work, int warpgroup) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r] = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      position[r] = work.seq_len - work.query_len + ((work.first_row + row[r]) >> p.pack_log2);
      if constexpr (HAS_ALIBI) {
        const int head = (work.head << p.pack_log2) + ((work.first_row + row[r]) & ((1 << p.pack_log2) - 1));
        slope[r] = p.alibi_slopes[head] * kLog2E;
      }
    }
  }
};

// Scores become those that softmax takes, up to the rows' factors: soft cap and ALiBi cannot be folded into them.
template <bool HAS_SOFT_CAP, bool HAS_ALIBI, int N>
__device__ __forceinline__ void finish_scores(const PrefillParams& p, const RowFacts& facts, int first_key,
                                              float (&s)[N], float (&factor)[2]) {
  if constexpr (HAS_SOFT_CAP) {
    const float inner[2] = {2.0f * facts.factor[0] / p.soft_cap, 2.0f * facts.factor[1] / p.soft_cap};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i] = p.soft_cap - __fdividef(2.0f * p.soft_cap, exp2_fast(s[i] * inner[i / 2 % 2]) + 1.0f);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = HAS_SOFT_CAP ? kLog2E : facts.factor[r];
  if constexpr (HAS_ALIBI) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int r = i / 2 % 2, distance = first_key + 2 * (threadIdx.x % 4) - facts.position[r];
      s[i] = s[i] * factor[r] + facts.slope[r] * static_cast<float>(distance + 8 * (i / 4) + i % 2);
    }
    factor[0] = factor[1] = 1.0f;
  }
}

// Hides keys after the row's position, and those that its window has left behind.
template <int N>
__device__ __forceinline__ void mask_scores(const PrefillParams& p, const RowFacts& facts, int first_key, float (&s)[N]) {
  int last[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) last[r] = facts.position[r] - first_key - 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (8 * (i / 4) + i % 2 > last[i / 2 % 2]) s[i] = kNothing;
  }
  if (p.sliding_window > 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (8 * (i / 4) + i % 2 <= last[i / 2 % 2] - p.sliding_window) s[i] = kNothing;
    }
  }
}

}  // namespace slipstream
