// The kernels of latent attention on the CPU, with the arguments of their own: see emulator.h. Built by emulation.py.

#include "epilogue/latent_merge.cuh"
#include "pipeline/latent_run.cuh"

extern "C" int slipstream_emulate(const LatentParams* params, unsigned seed) {
  using namespace slipstream;
  const LatentParams& p = *params;
  constexpr int kRowBytes = 2 * LatentShape::kKeyDim;
  const LatentMaps maps{{static_cast<const char*>(p.q), int64_t{p.num_tokens} * p.num_heads, kRowBytes, 64},
                        {static_cast<const char*>(p.latent_cache), p.num_blocks << p.block_size_log2, kRowBytes, 64}};
  emulator::warpgroups().clear();
  const auto attend = [&](char* shared) { run_latent_attention(p, maps, LatentMemory(shared)); };
  const int num_ctas = p.num_shares * p.num_lanes;
  if (emulator::run(num_ctas, LatentShape::kThreads, LatentMemory::kTotalBytes, seed, attend)) return 1;
  const auto merge = [&](char* shared) {
    auto* weights = reinterpret_cast<float*>(shared);
    LatentMerge{p, weights, weights + LatentMerge::kMostParts}.run(blockIdx.x);
  };
  constexpr int kMergeBytes = 4 * (LatentMerge::kMostParts + LatentMerge::kThreads / 16);
  return emulator::run(p.num_tokens * p.num_heads, LatentMerge::kThreads, kMergeBytes, seed, merge);
}
