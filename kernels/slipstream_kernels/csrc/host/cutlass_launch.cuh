// Shared by the products on CUTLASS: scales and bias in the epilogue, and the launch.
#pragma once

#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace slipstream {

// out = channel scale * (token scale * sum) + bias; without a bias its pointer is null, and 0 is added.
// TOKENS_ARE_ROWS: of the kernel's result; else they are its columns, and what it writes is transposed.
template <class TILE, class OUT, bool TOKENS_ARE_ROWS>
struct ScaledOutput {
  template <bool IS_OF_ROWS, class ELEMENT>
  using Broadcast = cute::conditional_t<
      IS_OF_ROWS,
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, TILE, ELEMENT, float, cute::Stride<cute::_1, cute::_0, cute::_0>>,
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, TILE, ELEMENT, float, cute::Stride<cute::_0, cute::_1, cute::_0>>>;
  template <template <class> class OPERATION, class RESULT>
  using Compute = cutlass::epilogue::fusion::Sm90Compute<OPERATION, RESULT, float,
                                                         cutlass::FloatRoundStyle::round_to_nearest>;
  using Scaled = cutlass::epilogue::fusion::Sm90EVT<Compute<cutlass::multiplies, float>, Broadcast<TOKENS_ARE_ROWS, float>,
                                                    cutlass::epilogue::fusion::Sm90AccFetch>;
  using Fusion = cutlass::epilogue::fusion::Sm90EVT<Compute<cutlass::homogeneous_multiply_add, OUT>,
                                                    Broadcast<!TOKENS_ARE_ROWS, float>, Scaled,
                                                    Broadcast<!TOKENS_ARE_ROWS, OUT>>;

  template <class PARAMS>
  static typename Fusion::Arguments arguments(PARAMS const& p) {
    return {{p.channel_scale, 1.f, {}},
            {{p.token_scale, 1.f, {}}, {}, {}},
            {static_cast<OUT const*>(p.bias), OUT(0), {}},
            {}};
  }
};

// A kernel needs more shared memory than a launch may have by default; asked for once per device.
template <class KERNEL>
cudaError_t allow_shared_memory(int device) {
  static bool is_allowed[64] = {};
  if (device >= 0 && device < 64 && is_allowed[device]) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(cutlass::device_kernel<KERNEL>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, KERNEL::SharedStorageSize);
  if (error == cudaSuccess && device >= 0 && device < 64) is_allowed[device] = true;
  return error;
}

// 0, a cudaError_t, or minus a cutlass::Status. params has device, num_sms and is_dependent. No kernel here has a
// workspace.
template <class GEMM, class PARAMS>
int launch_gemm(typename GEMM::Arguments arguments, PARAMS const& params, cudaStream_t stream) {
  using Kernel = typename GEMM::GemmKernel;
  arguments.hw_info.device_id = params.device;
  arguments.hw_info.sm_count = params.num_sms;
  if (auto status = GEMM::can_implement(arguments); status != cutlass::Status::kSuccess) return -int(status);
  if (auto error = allow_shared_memory<Kernel>(params.device); error != cudaSuccess) return int(error);
  typename Kernel::Params kernel_params = Kernel::to_underlying_arguments(arguments, nullptr);
  const auto status = GEMM::run(kernel_params, stream, nullptr, params.is_dependent != 0);
  if (status == cutlass::Status::kSuccess) return 0;
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? int(error) : -int(status);
}

}  // namespace slipstream
