// W8A8 products of many tokens on CUTLASS: int8 rows times int8 weights, exact sums in int32, scales and bias in the
// epilogue.  One configuration a library, by macros: SLIPSTREAM_TILE_TOKENS, _TILE_ROWS (tokens and output features of
// a tile), _CLUSTER (tiles of tokens that share their weights) and _OUT (element of the result).

#include "host/cutlass_launch.cuh"
#include "params/int8_gemm_params.h"
#include "host/library.h"

namespace slipstream {
using namespace cute;

using Out = cutlass::SLIPSTREAM_OUT;
using Tile = Shape<Int<SLIPSTREAM_TILE_TOKENS>, Int<SLIPSTREAM_TILE_ROWS>, _128>;
using Cluster = Shape<Int<SLIPSTREAM_CLUSTER>, _1, _1>;
using Scaling = ScaledOutput<Tile, Out, true>;

constexpr int ALIGNMENT = 128 / cutlass::sizeof_bits<Out>::value;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, void, cutlass::layout::RowMajor, ALIGNMENT, Out,
    cutlass::layout::RowMajor, ALIGNMENT, cutlass::epilogue::TmaWarpSpecializedCooperative, Scaling::Fusion>::CollectiveOp;
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
  return {cutlass::gemm::GemmUniversalMode::kGemm,
          {p.num_tokens, p.out_features, p.in_features, 1},
          {static_cast<int8_t const*>(p.x), rows, static_cast<int8_t const*>(p.weight), rows},
          {Scaling::arguments(p), nullptr, typename Kernel::StrideC{}, static_cast<Out*>(p.out), out_stride}};
}

}  // namespace slipstream

// 0, a cudaError_t, or minus a cutlass::Status.
SLIPSTREAM_API int slipstream_int8_gemm(const slipstream::Int8GemmParams* params, cudaStream_t stream) {
  return slipstream::launch_gemm<slipstream::Gemm>(slipstream::arguments_of(*params), *params, stream);
}
