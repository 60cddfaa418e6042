// The verify kernel on the CPU, with the arguments of its own: see emulator.h. Built by emulation.py.

#include "pipeline/verify_run.cuh"

extern "C" int slipstream_emulate(const VerifyParams* params, unsigned seed) {
  using namespace slipstream;
  using Shape = VerifyShape<SLIPSTREAM_TYPE, static_cast<KvType>(SLIPSTREAM_KV)>;
  const VerifyParams& p = *params;
  const int num_ctas = p.num_requests * p.num_kv_heads * p.row_tiles * p.splits;
  emulator::warpgroups().clear();
  const auto attend = [&](char* shared) { run_verify_attention<Shape>(p, shared); };
  return emulator::run(num_ctas, Shape::kThreads, Shape::kTotalBytes, seed, attend, p.splits);
}
