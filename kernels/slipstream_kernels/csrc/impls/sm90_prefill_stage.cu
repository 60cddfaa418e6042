// Copies the blocks of some requests, of 8 or 4 bits, into buffers of fp16 in the order of their tokens, for prefill
// attention (PrefillKv::kStaged, kFp8Keys): a long prompt reads each block many times, and converts it once so.
//
// int8 and int4 are multiplied by their tokens' scales; fp8 is copied as stored, its heads' scales are left to
// attention. Rows past a sequence become zero up to the end of its last block of 64.

#include <cuda_runtime.h>

#include "host/library.h"
#include "pipeline/prefill_convert.cuh"
#include "params/prefill_stage_params.h"

namespace slipstream {

constexpr int kStageThreads = 256;

// Grid: blocks of 64 tokens of a request, kv heads, requests x (keys, values).
template <KvType KV>
__global__ void __launch_bounds__(kStageThreads) prefill_stage_kernel(const PrefillStageParams p) {
  using Words = std::conditional_t<KV == KvType::kInt4, uint2, uint4>;  // sixteen values
  const int block = blockIdx.x, head = blockIdx.y, request = blockIdx.z / 2;
  const bool is_key = blockIdx.z % 2 == 0;
  void* staged = is_key ? p.keys : p.values;
  const int seq_len = p.seq_lens[request];
  if (staged == nullptr || block << kStagedRowsLog2 >= seq_len) return;
  const auto* cache = static_cast<const Words*>(is_key ? p.key_cache : p.value_cache);
  const float* scales = is_key ? p.key_scale : p.value_scale;
  const int units = p.head_dim / 16;
  const int64_t out_row = (static_cast<int64_t>(request * p.staged_blocks + block) * p.num_kv_heads + head)
                          << kStagedRowsLog2;
  for (int i = threadIdx.x; i < units << kStagedRowsLog2; i += kStageThreads) {
    const int row = i / units, unit = i % units, key = (block << kStagedRowsLog2) + row;
    uint32_t pairs[8] = {};
    const int place = key < seq_len ? p.block_tables[request * p.table_stride + (key >> p.block_size_log2)] : -1;
    if (place >= 0) {
      const int64_t cached = ((static_cast<int64_t>(place) * p.num_kv_heads + head) << p.block_size_log2) +
                             (key & ((1 << p.block_size_log2) - 1));
      const Words words = cache[cached * units + unit];
      convert_values<KV>(reinterpret_cast<const uint32_t*>(&words), KV == KvType::kFp8E4m3 ? 1.0f : scales[cached],
                         pairs);
    }
    auto* out = static_cast<uint4*>(staged) + ((out_row + row) * units + unit) * 2;
    out[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    out[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
  }
}

template <KvType KV>
cudaError_t launch_stage(const PrefillStageParams& p, cudaStream_t stream) {
  const dim3 grid(p.staged_blocks, p.num_kv_heads, 2 * p.num_requests);
  prefill_stage_kernel<KV><<<grid, kStageThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace slipstream

// Returns a cudaError_t; 0 is success.
SLIPSTREAM_API int slipstream_prefill_stage(const PrefillStageParams* params, void* stream) {
  using namespace slipstream;
  const auto to = static_cast<cudaStream_t>(stream);
  switch (static_cast<KvType>(params->kv_type)) {
    case KvType::kFp8E4m3: return launch_stage<KvType::kFp8E4m3>(*params, to);
    case KvType::kInt8: return launch_stage<KvType::kInt8>(*params, to);
    case KvType::kInt4: return launch_stage<KvType::kInt4>(*params, to);
    default: return cudaErrorInvalidValue;
  }
}
