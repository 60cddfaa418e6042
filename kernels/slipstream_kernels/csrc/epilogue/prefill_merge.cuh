// Rows whose keys several CTAs share: each warp leaves its sums, and that of the CTAs which comes last adds all of
// them, in order of the keys, so that the result does not depend on which it is.
#pragma once

#include "schedule/prefill_shape.cuh"
#include "mma/prefill_softmax.cuh"

namespace slipstream {

template <typename SHAPE>
struct SplitMerger {
  static constexpr int kOutputs = SHAPE::kTileDim / 2;
  static constexpr int kFloats = kOutputs + 4;  // of a thread: outputs, maxima and normalisers of two rows

  const PrefillParams& p;
  const Work& work;
  int warpgroup;

  // Maxima in exponents of base 2, before and after. True: this warp came last, and state and out are of all keys.
  __device__ __forceinline__ bool run(RowState& state, float (&out)[kOutputs]) const {
    float* mine = part(work.split());
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) __stcg(mine + 128 * i, out[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      __stcg(mine + 128 * (kOutputs + r), state.maximum[r]);
      __stcg(mine + 128 * (kOutputs + 2 + r), state.normaliser[r]);
    }
    if (!is_last()) return false;
    float largest[2] = {kNothing, kNothing};
    for (int split = 0; split < work.num_splits(); ++split) {
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], __ldcg(part(split) + 128 * (kOutputs + r)));
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    state.normaliser[0] = state.normaliser[1] = 0.0f;
    for (int split = 0; split < work.num_splits(); ++split) {
      const float* from = part(split);
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float maximum = __ldcg(from + 128 * (kOutputs + r));
        factor[r] = maximum == kNothing ? 0.0f : exp2_fast(maximum - largest[r]);
        state.normaliser[r] += factor[r] * __ldcg(from + 128 * (kOutputs + 2 + r));
      }
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] = __fmaf_rn(__ldcg(from + 128 * i), factor[i / 2 % 2], out[i]);
    }
    state.maximum[0] = largest[0], state.maximum[1] = largest[1];
    return true;
  }

 private:
  __device__ __forceinline__ float* part(int split) const {
    const int64_t place = static_cast<int64_t>(work.first_part() + split) * SHAPE::kWarpgroups + warpgroup;
    return p.parts + place * (kFloats * 128) + threadIdx.x % 128;
  }

  // All lanes of the warp get the same answer. The last one leaves the counter as it found it.
  __device__ __forceinline__ bool is_last() const {
    __threadfence();
    __syncwarp();
    int count = 0;
    if (threadIdx.x % 32 == 0) {
      int32_t* counter = p.counters + 2 + (work.first_part() * SHAPE::kWarpgroups + warpgroup) * 4 + threadIdx.x % 128 / 32;
      count = atomicAdd(counter, 1);
      if (count == work.num_splits() - 1) *counter = 0;
      __threadfence();
    }
    return __shfl_sync(~0u, count, 0) == work.num_splits() - 1;
  }
};

}  // namespace slipstream
