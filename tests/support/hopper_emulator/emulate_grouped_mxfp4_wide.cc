// The grouped GEMM with MXFP4 weights on warpgroup products on the CPU: see emulator.h. Built by emulation.py.
#include "mma/grouped_mxfp4_wide_multiply.cuh"

extern "C" int slipstream_emulate(const slipstream::GroupedGemmParams* params, unsigned seed) {
  using namespace slipstream;
  using Shape = GroupedMxfp4WideShape<SLIPSTREAM_TILE_ROWS, SLIPSTREAM_STAGE_UNITS, SLIPSTREAM_STAGES, SLIPSTREAM_CTAS>;
  const GroupedGemmParams& p = *params;
  constexpr int kGroups = Shape::kTileRows / 8, kUnits = Mxfp4RowPermutation::kWarpUnits;
  const int pieces = (Shape::Unit::count(p.in_features) + kUnits - 1) / kUnits;
  const auto permute = [&](char*) {
    const int cta = static_cast<int>(blockIdx.x), group = cta / pieces;
    Mxfp4RowPermutation{p, Shape::kTileRows}.run(group / kGroups, group % kGroups, cta % pieces * kUnits);
  };
  if (emulator::run(p.max_token_tiles * kGroups * pieces, 32, 0, seed, permute)) return 1;
  const int feature_tiles = (p.out_features + Shape::kFeatures - 1) / Shape::kFeatures;
  emulator::warpgroups().clear();
  const auto multiply = [&](char* shared) {
    const int cta = static_cast<int>(blockIdx.x);
    multiply_grouped_mxfp4_wide<Shape>(p, cta % feature_tiles, cta / feature_tiles, shared);
  };
  return emulator::run(feature_tiles * p.max_token_tiles, Shape::kThreads, Shape::kTotalBytes, seed, multiply);
}
