// W8A8 products of many tokens on CUTLASS: int8 rows times int8 weights, exact sums in int32, scales and bias in the
// epilogue.  One configuration a library, by macros: SLIPSTREAM_TILE_TOKENS, _TILE_ROWS (tokens and output features of a
// tile), _CLUSTER (tiles of tokens that share their weights) and _OUT (element of the result).
#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "int8_gemm_params.h"

namespace slipstream {
using namespace cute;
namespace fusion = cutlass::epilogue::fusion;

using Out = cutlass::SLIPSTREAM_OUT;
using Tile = Shape<Int<SLIPSTREAM_TILE_TOKENS>, Int<SLIPSTREAM_TILE_ROWS>, _128>;
using Cluster = Shape<Int<SLIPSTREAM_CLUSTER>, _1, _1>;

// out = channel scale * (token scale * sum) + bias; without a bias its pointer is null, and 0 is added.
constexpr auto NEAREST = cutlass::FloatRoundStyle::round_to_nearest;
using TokenScale = fusion::Sm90ColBroadcast<0, Tile, float, float, Stride<_1, _0, _0>>;
using ChannelScale = fusion::Sm90RowBroadcast<0, Tile, float, float, Stride<_0, _1, _0>>;
using Bias = fusion::Sm90RowBroadcast<0, Tile, Out, float, Stride<_0, _1, _0>>;
using Scaled = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, float, float, NEAREST>, TokenScale,
                               fusion::Sm90AccFetch>;
using Fusion = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Out, float, NEAREST>,
                               ChannelScale, Scaled, Bias>;

constexpr int ALIGNMENT = 128 / cutlass::sizeof_bits<Out>::value;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, void, cutlass::layout::RowMajor, ALIGNMENT, Out,
    cutlass::layout::RowMajor, ALIGNMENT, cutlass::epilogue::TmaWarpSpecializedCooperative, Fusion>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor, 16, int8_t,
    cutlass::layout::ColumnMajor, 16, int32_t, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue,
                                                    cutlass::gemm::PersistentScheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments arguments_of(Int8GemmParams const& p) {
  const Stride<int64_t, Int<1>, int64_t> rows{p.in_features, {}, 0};
  typename Kernel::StrideD out_stride{};
  get<0>(out_stride) = p.out_features;
  typename Fusion::Arguments fused{{p.channel_scale, 1.f, {}},
                                   {{p.token_scale, 1.f, {}}, {}, {}},
                                   {static_cast<Out const*>(p.bias), Out(0), {}},
                                   {}};
  typename Gemm::Arguments a{cutlass::gemm::GemmUniversalMode::kGemm,
                             {p.num_tokens, p.out_features, p.in_features, 1},
                             {static_cast<int8_t const*>(p.x), rows, static_cast<int8_t const*>(p.weight), rows},
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

// 0, a cudaError_t, or minus a cutlass::Status.
SLIPSTREAM_API int slipstream_int8_gemm(const slipstream::Int8GemmParams* params, cudaStream_t stream) {
  using namespace slipstream;
  auto arguments = arguments_of(*params);
  if (auto status = Gemm::can_implement(arguments); status != cutlass::Status::kSuccess) return -int(status);
  if (auto error = allow_shared_memory(params->device); error != cudaSuccess) return int(error);
  typename Kernel::Params kernel_params = Kernel::to_underlying_arguments(arguments, nullptr);
  const auto status = Gemm::run(kernel_params, stream, nullptr, params->is_dependent != 0);
  if (status == cutlass::Status::kSuccess) return 0;
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? int(error) : -int(status);
}

SLIPSTREAM_API const char* slipstream_error_text(int error) { return cudaGetErrorString(cudaError_t(error)); }
