// W4A8 products of many tokens on CUTLASS: 4-bit weights in registers, e4m3 rows, scales and bias in the epilogue.
//
// The kernel's rows are output features and its columns tokens, so that the weights are the operand that passes through
// registers, and the result is written transposed, as [tokens, out_features].  One configuration a library, by macros:
//   SLIPSTREAM_TILE_ROWS, _TILE_TOKENS (output features and tokens of a tile), _CLUSTER (tiles of output features that
//   share their tokens), _GROUPS (groups per 128 input features), _OUT (element of the result), _STREAM_K (0 or 1).
#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "w4a8_layout.cuh"
#include "w4a8_mainloop.cuh"
#include "w4a8_params.h"

namespace slipstream {
using namespace cute;
namespace fusion = cutlass::epilogue::fusion;

using Out = cutlass::SLIPSTREAM_OUT;
using Tile = Shape<Int<SLIPSTREAM_TILE_ROWS>, Int<SLIPSTREAM_TILE_TOKENS>, _128>;
using Cluster = Shape<Int<SLIPSTREAM_CLUSTER>, _1, _1>;
using E4m3 = cutlass::float_e4m3_t;
using Word = cute::conditional_t<SLIPSTREAM_GROUPS == 1, uint32_t, uint64_t>;

// out = channel scale * (token scale * sum) + bias; without a bias its pointer is null, and 0 is added.
constexpr auto NEAREST = cutlass::FloatRoundStyle::round_to_nearest;
using TokenScale = fusion::Sm90RowBroadcast<0, Tile, float, float, Stride<_0, _1, _0>>;
using ChannelScale = fusion::Sm90ColBroadcast<0, Tile, float, float, Stride<_1, _0, _0>>;
using Bias = fusion::Sm90ColBroadcast<0, Tile, Out, float, Stride<_1, _0, _0>>;
using Scaled = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, float, float, NEAREST>, TokenScale,
                               fusion::Sm90AccFetch>;
using Fusion = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Out, float, NEAREST>,
                               ChannelScale, Scaled, Bias>;

constexpr int ALIGNMENT = 128 / cutlass::sizeof_bits<Out>::value;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, cutlass::layout::ColumnMajor, ALIGNMENT, Out,
    cutlass::layout::ColumnMajor, ALIGNMENT, cutlass::epilogue::TmaWarpSpecializedCooperative, Fusion>::CollectiveOp;
using Base = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cute::tuple<cutlass::int4b_t, Word>, Int4Layout, 32, E4m3,
    cutlass::layout::ColumnMajor, 16, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
using Mainloop = TableMainloop<Base, SLIPSTREAM_GROUPS>;
using Scheduler = cute::conditional_t<SLIPSTREAM_STREAM_K, cutlass::gemm::StreamKScheduler,
                                      cutlass::gemm::PersistentScheduler>;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, Scheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments arguments_of(W4a8Params const& p) {
  typename Base::StrideScale word_stride{};
  get<1>(word_stride) = p.out_features;
  typename Kernel::StrideD out_stride{};
  get<1>(out_stride) = p.out_features;
  typename Fusion::Arguments fused{{p.channel_scale, 1.f, {}},
                                   {{p.token_scale, 1.f, {}}, {}, {}},
                                   {static_cast<Out const*>(p.bias), Out(0), {}},
                                   {}};
  typename Gemm::Arguments a{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {p.out_features, p.num_tokens, p.in_features, 1},
      {static_cast<cutlass::int4b_t const*>(p.codes), int4_layout(p.out_features, p.in_features),
       static_cast<E4m3 const*>(p.x), Stride<int64_t, Int<1>, int64_t>{p.in_features, {}, 0},
       static_cast<Word const*>(p.words), word_stride, p.tiled_group},
      {fused, nullptr, typename Kernel::StrideC{}, static_cast<Out*>(p.out), out_stride}};
  a.hw_info.device_id = p.device;
  a.hw_info.sm_count = p.num_sms;
  return a;
}

// The kernel needs more shared memory than a launch may have by default; asked for once per device.
cudaError_t allow_shared_memory(int device) {
  static bool is_allowed[64] = {};
  if (device >= 0 && device < 64 && is_allowed[device]) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(cutlass::device_kernel<Kernel>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
  if (error == cudaSuccess && device >= 0 && device < 64) is_allowed[device] = true;
  return error;
}

}  // namespace slipstream

#define SLIPSTREAM_API extern "C" __attribute__((visibility("default")))

// Bytes of workspace that a call with these sizes needs.
SLIPSTREAM_API size_t slipstream_w4a8_workspace(const slipstream::W4a8Params* params) {
  return slipstream::Gemm::get_workspace_size(slipstream::arguments_of(*params));
}

// 0, a cudaError_t, or minus a cutlass::Status.
SLIPSTREAM_API int slipstream_w4a8_gemm(const slipstream::W4a8Params* params, cudaStream_t stream) {
  using namespace slipstream;
  auto arguments = arguments_of(*params);
  if (auto status = Gemm::can_implement(arguments); status != cutlass::Status::kSuccess) return -int(status);
  if (auto error = allow_shared_memory(params->device); error != cudaSuccess) return int(error);
  auto status = Kernel::initialize_workspace(arguments, params->workspace, stream);
  if (status != cutlass::Status::kSuccess) return -int(status);
  typename Kernel::Params kernel_params = Kernel::to_underlying_arguments(arguments, params->workspace);
  status = Gemm::run(kernel_params, stream, nullptr, params->is_dependent != 0);
  if (status == cutlass::Status::kSuccess) return 0;
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? int(error) : -int(status);
}

SLIPSTREAM_API const char* slipstream_error_text(int error) { return cudaGetErrorString(cudaError_t(error)); }

// Where the code of (row, column) is, counted in nibbles; host code, for tests of the layout in torch.
SLIPSTREAM_API long long slipstream_int4_offset(int row, int column, int out_features, int in_features) {
  return slipstream::int4_layout(out_features, in_features)(row, column, 0);
}
