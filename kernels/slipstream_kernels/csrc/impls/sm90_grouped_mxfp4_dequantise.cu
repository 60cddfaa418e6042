// Writes experts' MXFP4 weights out as bf16, exactly, for products of many rows. A warp expands a unit of 32 output features by
// 64 input features (grouped_mxfp4_layout.py), four rows at a time: a lane writes eight input features.
#include "formats/mxfp4_words.cuh"
#include "host/kernel_launch.h"
#include "host/library.h"
#include "ptx/dependent_launch.cuh"
#include "schedule/grouped_mxfp4_shape.cuh"

namespace slipstream {

constexpr int kWarps = 8;

// out_features: of all experts.
__global__ void __launch_bounds__(32 * kWarps) grouped_mxfp4_dequantise_kernel(const __grid_constant__ GroupedGemmParams p) {
  start_dependents();
  await_previous();
  using Unit = GroupedMxfp4Unit;
  constexpr uint32_t kLift = 0x5F805F80u;   // 2^64: with it, scales of 2^-127 are factors that bf16 holds
  constexpr int kLiftedScale = 32;          // what is taken from the biased exponents of products of 2^-32
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const int units = Unit::count(p.in_features);
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int feature = static_cast<int>(unit % units) * Unit::kInputs + 8 * chunk;
  if (unit >= static_cast<int64_t>(p.out_features / Unit::kFeatures) * units || feature >= p.in_features) return;
  const char* from = reinterpret_cast<const char*>(p.qweight) + unit * Unit::kBytes;
  auto* out = static_cast<__nv_bfloat16*>(p.out) + unit / units * Unit::kFeatures * p.in_features + feature;
#pragma unroll
  for (int i = 0; i < Unit::kFeatures / 4; ++i) {
    const int row = 4 * i + lane / 8, r16 = row / 16, r8 = row / 8 % 2, of_lane = row % 8;
    const int word = ((8 * r16 + of_lane) * 4 + chunk / 2) * 4 + 2 * r8 + chunk % 2;
    const int scale = Unit::kScaleOffset + 8 * of_lane + 4 * (chunk / 4) + 2 * r16 + r8;
    uint32_t pairs[4];
    const uint32_t factor = (reinterpret_cast<const uint8_t*>(from)[scale] - kLiftedScale) * 0x00800080u;
    expand_e2m1(reinterpret_cast<const uint32_t*>(from)[word], kLift, pairs);
#pragma unroll
    for (uint32_t& pair : pairs) pair = multiply_pair(pair, factor);
    *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * p.in_features) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace slipstream

// out: [out_features, in_features] bf16. Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_grouped_mxfp4_dequantise(const slipstream::GroupedGemmParams* params, void* stream) {
  using slipstream::GroupedMxfp4Unit;
  const slipstream::GroupedGemmParams& p = *params;
  if (p.out_features % GroupedMxfp4Unit::kFeatures != 0 || p.in_features % 32 != 0) return cudaErrorInvalidValue;
  const int64_t units =
      static_cast<int64_t>(p.out_features / GroupedMxfp4Unit::kFeatures) * GroupedMxfp4Unit::count(p.in_features);
  const dim3 grid(static_cast<unsigned>((units + slipstream::kWarps - 1) / slipstream::kWarps));
  return slipstream::launch_kernel(p.is_dependent != 0, grid, 32 * slipstream::kWarps, 0,
                                   static_cast<cudaStream_t>(stream), slipstream::grouped_mxfp4_dequantise_kernel, p);
}
