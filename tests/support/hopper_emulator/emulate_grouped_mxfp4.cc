// The grouped GEMM with MXFP4 weights on the CPU, with the arguments of its own: see emulator.h. Built by emulation.py.
#include "mma/grouped_mxfp4_multiply.cuh"

extern "C" int slipstream_emulate(const slipstream::GroupedGemmParams* params, unsigned seed) {
  using Shape = slipstream::GroupedMxfp4Shape<SLIPSTREAM_COLUMNS, SLIPSTREAM_TEAM_WARPS, SLIPSTREAM_TEAMS>;
  const int feature_tiles = (params->out_features + Shape::kFeatures - 1) / Shape::kFeatures;
  const auto kernel = [params, feature_tiles](char* shared) {
    const int cta = static_cast<int>(blockIdx.x);
    slipstream::multiply_grouped_mxfp4<Shape>(*params, cta % feature_tiles, cta / feature_tiles, shared);
  };
  return emulator::run(feature_tiles * params->max_token_tiles, Shape::kThreads, Shape::kTotalBytes, seed, kernel);
}
