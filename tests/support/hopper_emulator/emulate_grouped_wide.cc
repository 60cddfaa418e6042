// The grouped GEMMs with 4-bit weights on warpgroup products on the CPU: see emulator.h. Built by emulation.py.
#include "mma/grouped_wide_multiply.cuh"

#ifdef SLIPSTREAM_GROUPS
using Format = slipstream::WideInt4<SLIPSTREAM_INPUT, SLIPSTREAM_GROUPS>;
using Shape = slipstream::GroupedWideShape<Format, SLIPSTREAM_TILE_ROWS, 4, 2, SLIPSTREAM_CTAS>;
#else
using Shape = slipstream::GroupedWideShape<slipstream::WideMxfp4, SLIPSTREAM_TILE_ROWS, SLIPSTREAM_STAGE_UNITS, SLIPSTREAM_STAGES,
                                           SLIPSTREAM_CTAS>;
#endif

extern "C" int slipstream_emulate(const slipstream::GroupedGemmParams* params, unsigned seed) {
  using Permutation = slipstream::WideRowPermutation<Shape>;
  const slipstream::GroupedGemmParams& p = *params;
  const int pieces = (Permutation::count_units(p.in_features) + Permutation::kWarpUnits - 1) / Permutation::kWarpUnits;
  const auto permute = [&](char*) {
    const int cta = static_cast<int>(blockIdx.x);
    Permutation{p}.run(cta / pieces, cta % pieces * Permutation::kWarpUnits);
  };
  if (emulator::run(p.max_token_tiles * Permutation::kGroups * pieces, 32, 0, seed, permute)) return 1;
  const int feature_tiles = (p.out_features + Shape::kFeatures - 1) / Shape::kFeatures;
  emulator::warpgroups().clear();
  const auto multiply = [&](char* shared) {
    const int cta = static_cast<int>(blockIdx.x);
    slipstream::multiply_grouped_wide<Shape>(p, cta % feature_tiles, cta / feature_tiles, shared);
  };
  return emulator::run(feature_tiles * p.max_token_tiles, Shape::kThreads, Shape::kTotalBytes, seed, multiply);
}
