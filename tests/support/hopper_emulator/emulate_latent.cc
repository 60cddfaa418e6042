// The kernels of latent attention on the CPU, with the arguments of their own: see emulator.h. Built by emulation.py.

#include "epilogue/latent_merge.cuh"
#include "pipeline/latent_run.cuh"

extern "C" int slipstream_emulate(const LatentParams* params, unsigned seed) {
  using namespace slipstream;
  const LatentParams& p = *params;
  using Shape = LatentShape;
  constexpr int kRowBytes = 2 * Shape::kKeyDim, kFp8Bytes = Shape::kFp8RowBytes;
  const char* cache = static_cast<const char*>(p.latent_cache);
  const int64_t num_slots = p.num_blocks << p.block_size_log2;
  LatentMaps maps{{static_cast<const char*>(p.q), int64_t{p.num_tokens} * p.num_heads, kRowBytes, Shape::kRows},
                  {cache, num_slots, kRowBytes, 64}};
  if (Shape::kRows == 64) maps.cache.box_slabs = 2;
  maps.rope = {cache, num_slots, kRowBytes, 64};
  if (Shape::kIsFp8) {
    maps.cache = {cache, num_slots, kFp8Bytes, 64, Shape::kValueDim, 1, Shape::kScaleColumns, false};
    maps.scales = {cache + Shape::kValueDim, num_slots, kFp8Bytes, 64, 16, 4, 16, false};
    maps.rope = {cache + Shape::kRopeOffset, num_slots, kFp8Bytes, 64, 128};
  }
  emulator::warpgroups().clear();
  const auto attend = [&](char* shared) { run_latent_attention(p, maps, LatentMemoryOf(shared)); };
  const int num_ctas = p.num_shares * p.num_lanes;
  if (emulator::run(num_ctas, LatentShape::kThreads, LatentMemoryOf::kTotalBytes, seed, attend)) return 1;
  if (p.arrivals != nullptr) {
    for (int cta = 0; cta < num_ctas; ++cta) {
      if (p.arrivals[cta] != 0) return 1;
    }
    return 0;
  }
  const auto merge = [&](char* shared) {
    auto* weights = reinterpret_cast<float*>(shared);
    LatentMerge{p, weights, weights + LatentMerge::kMostParts}.run(blockIdx.x);
  };
  constexpr int kMergeBytes = 4 * (LatentMerge::kMostParts + LatentMerge::kThreads / 16);
  return emulator::run(p.num_tokens * p.num_heads, LatentMerge::kThreads, kMergeBytes, seed, merge);
}
