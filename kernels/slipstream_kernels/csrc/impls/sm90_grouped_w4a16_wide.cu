// Grouped GEMM with the experts' 4-bit integers and 16-bit rows, for Hopper (sm_90a), from some 16 rows an expert on.
// Contract: moe/grouped_int4_mm.py. Built once per variant of schedule/grouped_wide_shape.cuh, type of rows and number of
// groups of a block.
#include "host/grouped_wide_launch.cuh"
#include "host/library.h"

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_grouped_w4a16_wide(const slipstream::GroupedGemmParams* params, void* stream) {
  using Format = slipstream::WideInt4<SLIPSTREAM_INPUT, SLIPSTREAM_GROUPS>;
  using Shape = slipstream::GroupedWideShape<Format, SLIPSTREAM_TILE_ROWS, 4, 2, SLIPSTREAM_CTAS>;
  if (params->out_features % 16 != 0 || params->in_features % 128 != 0) return cudaErrorInvalidValue;
  return slipstream::launch_grouped_wide<Shape>(*params, static_cast<cudaStream_t>(stream));
}
