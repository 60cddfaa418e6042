// The kernel of all layers on the CPU, with the arguments of its own: see emulator.h. Built by emulation.py.

#include <type_traits>

#include "decode_layers/layers_step.cuh"

extern "C" int slipstream_emulate(const slipstream::LayersParams* params, unsigned seed) {
  using Format = slipstream::SLIPSTREAM_WEIGHTS;
  using Shape = slipstream::LayersShape<Format>;
  const auto kernel = [params](char* shared) {
    slipstream::run_step<Format, SLIPSTREAM_KV_BYTES>(*params, slipstream::LayersMemory<Format>{shared});
  };
  return emulator::run(params->num_ctas, Shape::kThreads, Shape::kTotalBytes, seed, kernel);
}
