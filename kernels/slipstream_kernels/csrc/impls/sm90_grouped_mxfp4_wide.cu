// Grouped GEMM with the experts' MXFP4 weights and bf16 rows, for Hopper (sm_90a), from some ten rows an expert on. Contract:
// moe/grouped_int4_mm.py. Built once per variant of schedule/grouped_wide_shape.cuh.
#include "host/grouped_wide_launch.cuh"
#include "host/library.h"

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_grouped_mxfp4_wide(const slipstream::GroupedGemmParams* params, void* stream) {
  using Shape = slipstream::GroupedWideShape<slipstream::WideMxfp4, SLIPSTREAM_TILE_ROWS, SLIPSTREAM_STAGE_UNITS,
                                             SLIPSTREAM_STAGES, SLIPSTREAM_CTAS>;
  if (params->out_features % 32 != 0 || params->in_features % 32 != 0) return cudaErrorInvalidValue;
  return slipstream::launch_grouped_wide<Shape>(*params, static_cast<cudaStream_t>(stream));
}
