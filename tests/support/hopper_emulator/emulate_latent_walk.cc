// What each CTA of latent attention finds to do, on the CPU: see emulator.h. out: [CTAs][kMostWorks] of LatentWork.

#include "ptx/hopper_copy.cuh"
#include "schedule/latent_work.cuh"

extern "C" int slipstream_emulate(const LatentParams* params, unsigned seed) {
  using namespace slipstream;
  constexpr int kThreads = 64, kMostWorks = 2048, kRows = 16, kKeys = 64;
  const LatentParams& p = *params;
  auto* works = static_cast<LatentWork*>(p.out);
  const auto walk_through = [&](char* shared) {
    int* numbers = reinterpret_cast<int*>(shared);
    auto walk = begin_walk<kThreads, kRows, kKeys>(p, numbers + kThreads, numbers);
    if (threadIdx.x != 0) return;
    LatentWork* work = works + blockIdx.x * kMostWorks;
    while (walk.advance(*work)) ++work;
    work->request = -1;
  };
  return emulator::run(p.num_shares * p.num_lanes, kThreads, 256 + 4 * p.num_requests, seed, walk_through);
}
