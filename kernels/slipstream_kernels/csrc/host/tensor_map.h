// Tensor maps for Hopper's tensor copies, made on the host.  The driver's function is found at run time: nothing links
// to libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace slipstream {

// A tensor, innermost dimension first, and the box of it that one copy takes.
template <int RANK>
struct Extent {
  uint64_t dims[RANK];
  uint64_t strides[RANK - 1];   // bytes, of the outer dimensions
  uint32_t box[RANK];
};

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

inline EncodeTensorMap find_tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTensorMap>(function) : nullptr;
}

// False if the driver has no such function or refuses the sizes. promotion: what L2 reads from memory for a box.
template <int RANK>
bool encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void* data,
                       const Extent<RANK>& extent,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  if (encode == nullptr) return false;
  const uint32_t ones[5] = {1, 1, 1, 1, 1};
  return encode(map, type, RANK, const_cast<void*>(data), extent.dims, extent.strides, extent.box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace slipstream
