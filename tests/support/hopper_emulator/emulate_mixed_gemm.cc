// The mixed-input product of pairs of e4m3 numbers on the CPU: see emulator.h. Built by emulation.py.
#include "mma/mixed_gemm_product.cuh"
#include "pipeline/split_rows.cuh"

using Format = slipstream::SLIPSTREAM_FORMAT<SLIPSTREAM_OPERAND, SLIPSTREAM_GROUPS>;

template <int WARPGROUPS_M>
int multiply(const slipstream::MixedGemmParams& p, unsigned seed) {
  using Shape = slipstream::MixedGemmShape<Format, SLIPSTREAM_COLUMNS, WARPGROUPS_M>;
  const int items = p.num_tokens * (p.in_features / slipstream::kSplitFeatures);
  const int ctas = (items + slipstream::kSplitThreads - 1) / slipstream::kSplitThreads;
  const auto split = [&](char*) { slipstream::split_rows<Format, SLIPSTREAM_COLUMNS>(p); };
  if (emulator::run(ctas, slipstream::kSplitThreads, 16, seed, split) != 0) return 1;
  slipstream::MixedGemmMaps maps;
  maps.tokens = {static_cast<const char*>(p.permuted_x), Shape::kColumns, p.in_features, Shape::kColumns};
  maps.tokens.element_bytes = 1;
  maps.tokens.box_slabs = Shape::kBlocks * Shape::kSlabs;
  emulator::warpgroups().clear();
  const auto product = [&](char* shared) { slipstream::multiply_mixed_gemm<Shape>(p, maps, shared); };
  return emulator::run(p.num_clusters, Shape::kThreads, Shape::kTotalBytes, seed, product);
}

extern "C" int slipstream_emulate(const slipstream::MixedGemmParams* params, unsigned seed) {
  if (params->warpgroups_m == 1) return multiply<1>(*params, seed);
  return params->warpgroups_m == 2 ? multiply<2>(*params, seed) : multiply<4>(*params, seed);
}
