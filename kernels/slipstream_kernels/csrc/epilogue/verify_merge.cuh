// From the sums of the CTAs of a cluster, each over its part of the keys, to rows of `out`: every CTA adds up its part
// of the rows, in the order of the keys.
#pragma once

#include "ptx/cluster_pair.cuh"
#include "mma/row_state.cuh"
#include "schedule/verify_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct VerifyMerge {
  using T = typename SHAPE::Element;
  static constexpr int kOutputs = SHAPE::kHeadDim / 2;
  static constexpr int kQuads = SHAPE::kHeadDim / 4;

  const VerifyParams& p;
  const VerifyWork& work;
  uint32_t memory;
  int rank;
  float scale;              // of raw products, base 2

  // All threads; no product reads shared memory any more.
  __device__ __forceinline__ void run(const RowState& state, const float (&out)[kOutputs]) const {
    wait_for_copies<0>();  // of no tile: a CTA without keys has its queries still on their way
    __syncthreads();
    leave(state, out);
    arrive_in_cluster();
    wait_for_cluster();
    const int rows = SHAPE::kRows / p.splits;
    for (int item = threadIdx.x; item < rows * kQuads; item += SHAPE::kThreads) {
      add_up(rank * rows + item / kQuads, item % kQuads);
    }
    arrive_in_cluster();
    wait_for_cluster();  // others may still read what lies here
  }

 private:
  __device__ __forceinline__ uint32_t sums(int row, int column) const {
    return memory + SHAPE::kSumOffset + (row * SHAPE::kSumStride + column) * 4;
  }
  __device__ __forceinline__ uint32_t state_of(int row) const { return memory + SHAPE::kStateOffset + row * 8; }

  // Leaves each row's maximum (base 2), normaliser and sums in shared memory, where the tiles were.
  __device__ __forceinline__ void leave(const RowState& state, const float (&out)[kOutputs]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      float sum = state.normaliser[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (threadIdx.x % 4 == 0) {
        const float maximum = state.maximum[r] == kNothing ? kNothing : state.maximum[r] * scale;
        store_shared_8(state_of(row), maximum, sum);
      }
#pragma unroll
      for (int i = 2 * r; i < kOutputs; i += 4) {
        store_shared_8(sums(row, 8 * (i / 4) + 2 * (threadIdx.x % 4)), out[i], out[i + 1]);
      }
    }
  }

  // Four columns of one row.
  __device__ __forceinline__ void add_up(int row, int quad) const {
    const int token = (work.first_row + row) / p.group, head = (work.first_row + row) % p.group;
    if (token >= work.query_len) return;
    float largest = kNothing, normaliser = 0.0f;
    for (int part = 0; part < p.splits; ++part) largest = fmaxf(largest, load_remote_8(address_in(state_of(row), part)).x);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int part = 0; part < p.splits; ++part) {
      const float2 state = load_remote_8(address_in(state_of(row), part));
      const float4 values = load_from_cluster(address_in(sums(row, 4 * quad), part));
      const float weight = state.x == kNothing ? 0.0f : exp2_fast(state.x - largest);
      normaliser += weight * state.y;
      sum.x += weight * values.x, sum.y += weight * values.y, sum.z += weight * values.z, sum.w += weight * values.w;
    }
    const float unit = SHAPE::kIsFp8 && p.value_scale != nullptr ? p.value_scale[work.kv_head] : 1.0f;
    const float inverse = normaliser == 0.0f ? 0.0f : unit / normaliser;
    const int64_t to_row = static_cast<int64_t>(work.start + token) * p.num_kv_heads * p.group + work.kv_head * p.group + head;
    uint2 packed = make_uint2(pack<T>(sum.x * inverse, sum.y * inverse), pack<T>(sum.z * inverse, sum.w * inverse));
    *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + to_row * SHAPE::kHeadDim + 4 * quad) = packed;
  }
};

}  // namespace slipstream
