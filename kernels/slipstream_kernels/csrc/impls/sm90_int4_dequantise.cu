// Writes 4-bit weights out in 16 bits, row by row, for a library's products of many 16-bit rows. A thread expands the 8 bytes
// of a lane: eight input features of two output features.
#include "formats/int4_converter.cuh"
#include "params/skinny_gemm_w4a16_params.h"
#include "host/library.h"

namespace slipstream {

template <typename T>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float scale) {
  T values[2];
  memcpy(values, &pair, 4);
  return pack<T>(to_float(values[0]) * scale, to_float(values[1]) * scale);
}

// p.qweight: in the order of int4_layout.py.
template <typename T>
__global__ void dequantise_kernel(const SkinnyGemmW4A16Params p) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= int64_t{p.out_features} * p.in_features / 16) return;
  const int lane = index % 32, fragments = p.in_features / 32;
  const int64_t fragment = index / 32;
  const int row = static_cast<int>(fragment / fragments) * 16 + lane / 4;
  const int column = static_cast<int>(fragment % fragments) * 32 + lane % 4 * 4;
  const uint2 qweight = reinterpret_cast<const uint2*>(p.qweight)[index];
  const int groups = p.groups_per_block, group = p.is_channelwise ? 0 : column / 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    const uint32_t packed = p.group_scales[(int64_t{group} * p.out_features + r) * groups + (groups == 2 ? column / 64 % 2 : 0)];
    const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(packed))) * p.channel_scale[r];
    uint32_t pairs[4];   // input features i and i + 16
    Int4Converter<T>(packed >> 16).expand(half ? qweight.y : qweight.x, pairs);
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = scaled_pair<T>(pairs[i], scale);
    T* to = static_cast<T*>(p.out) + int64_t{r} * p.in_features + column;
    *reinterpret_cast<uint2*>(to) = {__byte_perm(out[0], out[1], 0x5410), __byte_perm(out[2], out[3], 0x5410)};
    *reinterpret_cast<uint2*>(to + 16) = {__byte_perm(out[0], out[1], 0x7632), __byte_perm(out[2], out[3], 0x7632)};
  }
}

}  // namespace slipstream

// out: [out_features, in_features] bf16, or fp16 if out_is_half. Returns a cudaError_t.
SLIPSTREAM_API int slipstream_int4_dequantise(const slipstream::SkinnyGemmW4A16Params* params, void* stream) {
  const int64_t threads = int64_t{params->out_features} * params->in_features / 16;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto blocks = static_cast<unsigned>((threads + 255) / 256);
  if (params->out_is_half != 0) {
    slipstream::dequantise_kernel<__half><<<blocks, 256, 0, cuda_stream>>>(*params);
  } else {
    slipstream::dequantise_kernel<__nv_bfloat16><<<blocks, 256, 0, cuda_stream>>>(*params);
  }
  return static_cast<int>(cudaGetLastError());
}
