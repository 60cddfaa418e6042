// The streaming W4A8 product on the CPU: see emulator.h. Built by emulation.py.
#include "mma/stream_w4a8_product.cuh"

using Shape = slipstream::StreamW4A8Shape<SLIPSTREAM_OUT, SLIPSTREAM_GROUPS, SLIPSTREAM_WARPGROUPS, SLIPSTREAM_COLUMNS,
                                          SLIPSTREAM_IS_EXACT != 0>;

extern "C" int slipstream_emulate(const StreamW4A8Params* params, unsigned seed) {
  const StreamW4A8Params& p = *params;
  slipstream::StreamW4A8Maps maps;
  maps.tokens = {static_cast<const char*>(p.x), p.num_tokens, p.x_row_stride, Shape::kColumns};
  maps.tokens.width = p.in_features;
  maps.tokens.element_bytes = 1;
  emulator::warpgroups().clear();
  const auto multiply = [&](char* shared) { slipstream::multiply_stream_w4a8<Shape>(p, maps, shared); };
  return emulator::run(p.num_ctas, Shape::kThreads, Shape::kTotalBytes, seed, multiply);
}
