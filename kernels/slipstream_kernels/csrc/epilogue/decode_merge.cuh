// From the warps' partial outputs to the rows of `out`: first over the warps of a CTA, then, for a unit that several
// CTAs share, by the last of them to arrive, over partial outputs in global memory. Weights follow the log-sum-exp
// (Flash-Decoding); the order of the sums is fixed, so a launch repeats bit for bit.
#pragma once

#include "mma/decode_softmax.cuh"
#include "ptx/part_counter.cuh"

namespace slipstream {

// Where the output of one segment goes.
struct Destination {
  int num_parts;    // CTAs that share the unit; 1: straight to out
  int first_cta;
  int slot;         // of this CTA's part

  __device__ __forceinline__ Destination(const Segment& segment, int share, int cta) {
    first_cta = segment.unit_start / share;
    num_parts = (segment.unit_start + segment.work.num_tiles - 1) / share - first_cta + 1;
    slot = slot_of(cta);
  }
  // A CTA has at most two shared units: one that came to it and one that it hands on.
  __device__ __forceinline__ int slot_of(int cta) const { return 2 * cta + (cta == first_cta ? 1 : 0); }
};

template <typename SHAPE>
struct Merge {
  using Output = typename SHAPE::Output;
  const DecodeParams& p;
  float* rounds;    // shared: [kWarps][8][kRoundStride]
  float2* states;   // shared: [kWarps][kRows] maximum, normaliser

  // All threads. Empties no state: the caller clears it for the next segment.
  __device__ __forceinline__ void write(RowState<SHAPE>& state, const Segment& segment, const Destination& to) {
    share_states(state);
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
#pragma unroll
      for (int first_step = 0; first_step < SHAPE::kSteps; first_step += SHAPE::kRoundSteps) {
        if (n + first_step > 0) __syncthreads();
        share_outputs(state, n, first_step);
        __syncthreads();
        merge_round(segment, to, n, first_step);
      }
    }
    if (to.num_parts > 1) finish_shared_unit(segment, to);
  }

 private:
  __device__ __forceinline__ void share_states(RowState<SHAPE>& state) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < SHAPE::kNumN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = sum_over_tokens(state.normaliser[n][e]);
        if constexpr (SHAPE::Format::kIsInteger) {
          state.operand_sum[n][e] = SHAPE::Format::kOffset / kOperandBoost * sum_over_tokens(state.operand_sum[n][e]);
        }
        const int row = 8 * n + 2 * (lane % 4) + e;
        if (lane < 4) states[warp * SHAPE::kRows + row] = make_float2(state.maximum[n][e], sum);
      }
    }
  }

  static __device__ __forceinline__ float sum_over_tokens(float sum) {
    for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
  }

  __device__ __forceinline__ void share_outputs(const RowState<SHAPE>& state, int n, int first_step) {
    const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
    float* mine = rounds + threadIdx.x / 32 * 8 * SHAPE::kRoundStride;
#pragma unroll
    for (int step = 0; step < SHAPE::kRoundSteps; ++step) {
      if (first_step + step < SHAPE::kSteps) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int dim = SHAPE::Format::value_dim(step, i, e / 2);
          float value = state.out[n][first_step + step][e];
          if constexpr (SHAPE::Format::kIsInteger) {
            value = value * SHAPE::Format::value_unit(e / 2) - state.operand_sum[n][e % 2];
          }
          mine[(2 * j + e % 2) * SHAPE::kRoundStride + dim] = value;
        }
      }
    }
  }

  // Sums the warps' outputs of 8 rows x (16 kRoundSteps) dims, and writes them out or as this CTA's part.
  __device__ __forceinline__ void merge_round(const Segment& segment, const Destination& to, int n, int first_step) {
    constexpr int kQuads = 4 * SHAPE::kRoundSteps;
    for (int item = threadIdx.x; item < 8 * kQuads; item += SHAPE::kThreads) {
      const int row = 8 * n + item / kQuads, quad = item % kQuads, dim = 16 * first_step + 4 * quad;
      float maximum = kNoMaximum, normaliser = 0.0f;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int warp = 0; warp < SHAPE::kWarps; ++warp) maximum = fmaxf(maximum, states[warp * SHAPE::kRows + row].x);
#pragma unroll
      for (int warp = 0; warp < SHAPE::kWarps; ++warp) {
        const float2 part = states[warp * SHAPE::kRows + row];
        const float weight = exp2_fast(part.x - maximum);
        normaliser += weight * part.y;
        add(sum, weight, *reinterpret_cast<const float4*>(
            rounds + (warp * 8 + row % 8) * SHAPE::kRoundStride + 4 * quad));
      }
      if (dim >= SHAPE::kHeadDim) continue;
      if (to.num_parts == 1) {
        store_row(segment, row, dim, maximum, normaliser, sum);
      } else {
        const int64_t part_row = static_cast<int64_t>(to.slot) * SHAPE::kRows + row;
        __stcg(reinterpret_cast<float4*>(p.partial_out + part_row * SHAPE::kHeadDim + dim), sum);
        if (dim == 0) __stcg(reinterpret_cast<float2*>(p.partial_state) + part_row, make_float2(maximum, normaliser));
      }
    }
  }

  static __device__ __forceinline__ void add(float4& sum, float weight, const float4& part) {
    sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
  }

  __device__ __forceinline__ void store_row(const Segment& segment, int row, int dim, float maximum, float normaliser,
                                            float4 sum) {
    const int unit_row = segment.row_tile * SHAPE::kRows + row;
    if (unit_row >= segment.work.query_len * p.group) return;
    const int64_t token = segment.work.start + unit_row / p.group;
    const int64_t head = segment.kv_head * p.group + unit_row % p.group;
    float factor = inverse_normaliser(normaliser, maximum, p.sinks == nullptr ? -INFINITY : p.sinks[head] * kLog2E);
    if (!SHAPE::Format::kIsInteger && p.value_scale != nullptr) factor *= p.value_scale[segment.kv_head];
    const uint2 packed = make_uint2(pack<Output>(sum.x * factor, sum.y * factor),
                                    pack<Output>(sum.z * factor, sum.w * factor));
    Output* out = static_cast<Output*>(p.out) + (token * p.num_kv_heads * p.group + head) * SHAPE::kHeadDim + dim;
    *reinterpret_cast<uint2*>(out) = packed;
  }

  // The last CTA to arrive merges all parts, and leaves the counter at zero for the next launch.
  __device__ __forceinline__ void finish_shared_unit(const Segment& segment, const Destination& to) {
    __shared__ int is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = count_part(p.arrivals + to.first_cta) == to.num_parts - 1;
      if (is_last) p.arrivals[to.first_cta] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    constexpr int kQuads = SHAPE::kHeadDim / 4;
    for (int item = threadIdx.x; item < SHAPE::kRows * kQuads; item += SHAPE::kThreads) {
      merge_parts(segment, to, item / kQuads, item % kQuads * 4);
    }
  }

  // Parts are loaded many at a time: one by one, their latency was a third of a small batch's launch.
  __device__ __forceinline__ void merge_parts(const Segment& segment, const Destination& to, int row, int dim) {
    if (segment.row_tile * SHAPE::kRows + row >= segment.work.query_len * p.group) return;
    constexpr int kBatch = SHAPE::kNumN == 1 ? 16 : 8;
    float maximum = kNoMaximum, normaliser = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = 0; first < to.num_parts; first += kBatch) {
      float2 states_of[kBatch];
      float4 outputs_of[kBatch];
#pragma unroll
      for (int part = 0; part < kBatch; ++part) {
        states_of[part] = make_float2(kNoMaximum, 0.0f);
        outputs_of[part] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + part < to.num_parts) {
          const int64_t part_row = static_cast<int64_t>(to.slot_of(to.first_cta + first + part)) * SHAPE::kRows + row;
          states_of[part] = __ldcg(reinterpret_cast<const float2*>(p.partial_state) + part_row);
          outputs_of[part] = __ldcg(reinterpret_cast<const float4*>(p.partial_out + part_row * SHAPE::kHeadDim + dim));
        }
      }
      float highest = maximum;
#pragma unroll
      for (int part = 0; part < kBatch; ++part) highest = fmaxf(highest, states_of[part].x);
      const float rescale = exp2_fast(maximum - highest);
      maximum = highest;
      normaliser *= rescale;
      sum.x *= rescale, sum.y *= rescale, sum.z *= rescale, sum.w *= rescale;
#pragma unroll
      for (int part = 0; part < kBatch; ++part) {
        const float weight = exp2_fast(states_of[part].x - maximum);
        normaliser += weight * states_of[part].y;
        add(sum, weight, outputs_of[part]);
      }
    }
    store_row(segment, row, dim, maximum, normaliser, sum);
  }
};

}  // namespace slipstream
