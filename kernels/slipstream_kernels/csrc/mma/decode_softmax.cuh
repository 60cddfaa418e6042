// Scores to probabilities: scale, soft cap, ALiBi, masks, and the running softmax of a warp's rows.
//
// A score fragment holds, for each group n of 8 rows, rows 2j and 2j + 1 of tokens i and i + 8, where i = lane / 4 and
// j = lane % 4; the output fragments hold the same rows, so a row's maximum and rescaling stay in its lanes.
#pragma once

#include "schedule/decode_shape.cuh"

namespace slipstream {

// A maximum that no score reaches and that still gives exp2(maximum - maximum) = 1, never NaN.
constexpr float kNoMaximum = -1e30f;
// The running maximum may lag behind by this much (base 2): most tiles then need neither shuffles nor rescaling.
// Probabilities up to 16 are safe in fp16, for integer caches with value scales up to 64.
constexpr float kMaximumLag = 4.0f;

// Query, position and ALiBi slope of the warp's rows. Row r of the tile is query r / group of the request, head r % group.
template <int NUM_N>
struct RowFacts {
  int query[NUM_N][2];
  int position[NUM_N][2];
  float slope[NUM_N][2];  // base 2

  __device__ __forceinline__ void load(const DecodeParams& p, const Segment& segment) {
    const int j = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < NUM_N; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = segment.row_tile * 8 * NUM_N + 8 * n + 2 * j + e;
        const int index = min(row / p.group, segment.work.query_len - 1);
        query[n][e] = index;
        position[n][e] = segment.work.seq_len - segment.work.query_len + index;
        if (p.positions != nullptr) position[n][e] = static_cast<int>(p.positions[segment.work.start + index]);
        slope[n][e] = 0.0f;
        if (p.alibi_slopes != nullptr) slope[n][e] = p.alibi_slopes[segment.kv_head * p.group + row % p.group] * kLog2E;
      }
    }
  }
};

__device__ __forceinline__ bool is_visible(const DecodeParams& p, const Segment& segment, int token, int key_position,
                                           int query, int position) {
  const int draft = token - (segment.work.seq_len - segment.work.query_len);
  bool visible = token < segment.work.seq_len;
  if (p.tree_mask == nullptr) {
    visible &= draft <= query;
  } else if (visible && draft >= 0) {
    visible = (p.tree_mask[segment.work.start + query] >> draft) & 1;
  }
  return visible && (p.sliding_window == 0 || position - key_position < p.sliding_window);
}

// Raw products to scores in base 2, hidden ones to -inf.  first_token: the tile's.
template <int NUM_N>
__device__ __forceinline__ void mask_scores(const DecodeParams& p, const Segment& segment,
                                            const RowFacts<NUM_N>& facts, int first_token, float (&scores)[NUM_N][4]) {
  const int prefix = segment.work.seq_len - segment.work.query_len;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = first_token + threadIdx.x % 32 / 4 + 8 * h;
    int key_position = token;
    if (p.positions != nullptr && token >= prefix && token < segment.work.seq_len) {
      key_position = static_cast<int>(p.positions[segment.work.start + token - prefix]);
    }
#pragma unroll
    for (int n = 0; n < NUM_N; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[n][2 * h + e];
        score += facts.slope[n][e] * static_cast<float>(key_position - facts.position[n][e]);
        if (!is_visible(p, segment, token, key_position, facts.query[n][e], facts.position[n][e])) score = -INFINITY;
      }
    }
  }
}

template <int NUM_N>
__device__ __forceinline__ void scale_scores(const DecodeParams& p, float scale, float (&scores)[NUM_N][4]) {
  if (p.soft_cap == 0.0f) {
#pragma unroll
    for (int n = 0; n < NUM_N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= scale * kLog2E;
    }
    return;
  }
  // cap * tanh(x) with tanh(x) = 1 - 2 / (exp(2 x) + 1); tanh.approx errs by 2^-11 of the cap, too much for a logit.
#pragma unroll
  for (int n = 0; n < NUM_N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float exponential = exp2_fast(scores[n][e] * (2.0f * kLog2E * scale / p.soft_cap));
      scores[n][e] = p.soft_cap * kLog2E * (1.0f - __fdividef(2.0f, exponential + 1.0f));
    }
  }
}

// The running softmax of a warp's rows: maximum (base 2, lagging), this lane's shares of the normaliser and of the sum
// of probabilities as the products take them (integer caches), and the unnormalised output.
template <typename SHAPE>
struct RowState {
  float maximum[SHAPE::kNumN][2];
  float normaliser[SHAPE::kNumN][2];
  float operand_sum[SHAPE::kNumN][2];
  float out[SHAPE::kNumN][SHAPE::kSteps][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
      maximum[n][0] = maximum[n][1] = kNoMaximum;
      normaliser[n][0] = normaliser[n][1] = 0.0f;
      operand_sum[n][0] = operand_sum[n][1] = 0.0f;
#pragma unroll
      for (int step = 0; step < SHAPE::kSteps; ++step) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][step][e] = 0.0f;
      }
    }
  }

  // Raises the maximum where a score exceeds it by more than the allowed lag.
  __device__ __forceinline__ void follow(const float (&scores)[SHAPE::kNumN][4]) {
    bool is_exceeded = false;
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) is_exceeded |= scores[n][e] > maximum[n][e % 2] + kMaximumLag;
    }
    if (!__any_sync(~0u, is_exceeded)) return;
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float highest = fmaxf(maximum[n][e], fmaxf(scores[n][e], scores[n][e + 2]));
        for (int distance = 4; distance < 32; distance *= 2) {
          highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
        }
        const float rescale = exp2_fast(maximum[n][e] - highest);
        maximum[n][e] = highest;
        normaliser[n][e] *= rescale;
        operand_sum[n][e] *= rescale;
#pragma unroll
        for (int step = 0; step < SHAPE::kSteps; ++step) {
          out[n][step][e] *= rescale;
          out[n][step][e + 2] *= rescale;
        }
      }
    }
  }
};

}  // namespace slipstream
