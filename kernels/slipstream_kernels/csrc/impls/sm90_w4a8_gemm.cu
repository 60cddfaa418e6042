// W4A8 products of many tokens on CUTLASS: 4-bit weights in registers, e4m3 rows, scales and bias in the epilogue.
//
// The kernel's rows are output features and its columns tokens, so that the weights are the operand that passes through
// registers, and the result is written transposed, as [tokens, out_features].  One configuration a library, by macros:
//   SLIPSTREAM_TILE_ROWS, _TILE_TOKENS (output features and tokens of a tile), _CLUSTER (tiles of output features that
//   share their tokens), _GROUPS (groups per 128 input features), _OUT (element of the result).

#include "host/cutlass_launch.cuh"
#include "host/library.h"
#include "formats/w4a8_layout.cuh"
#include "mma/w4a8_mainloop.cuh"
#include "params/w4a8_params.h"

namespace slipstream {
using namespace cute;

using Out = cutlass::SLIPSTREAM_OUT;
using Tile = Shape<Int<SLIPSTREAM_TILE_ROWS>, Int<SLIPSTREAM_TILE_TOKENS>, _128>;
using Cluster = Shape<Int<SLIPSTREAM_CLUSTER>, _1, _1>;
using E4m3 = cutlass::float_e4m3_t;
using Word = cute::conditional_t<SLIPSTREAM_GROUPS == 1, uint32_t, uint64_t>;
using Scaling = ScaledOutput<Tile, Out, false>;

constexpr int ALIGNMENT = 128 / cutlass::sizeof_bits<Out>::value;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, cutlass::layout::ColumnMajor, ALIGNMENT, Out,
    cutlass::layout::ColumnMajor, ALIGNMENT, cutlass::epilogue::TmaWarpSpecializedCooperative,
    Scaling::Fusion>::CollectiveOp;
using Base = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cute::tuple<cutlass::int4b_t, Word>, Int4Layout, 32, E4m3,
    cutlass::layout::ColumnMajor, 16, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
using Mainloop = TableMainloop<Base, SLIPSTREAM_GROUPS>;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue,
                                                    cutlass::gemm::PersistentScheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments arguments_of(W4a8Params const& p) {
  typename Base::StrideScale word_stride{};
  get<1>(word_stride) = p.out_features;
  typename Kernel::StrideD out_stride{};
  get<1>(out_stride) = p.out_features;
  return {cutlass::gemm::GemmUniversalMode::kGemm,
          {p.out_features, p.num_tokens, p.in_features, 1},
          {static_cast<cutlass::int4b_t const*>(p.qweight), int4_layout(p.out_features, p.in_features),
           static_cast<E4m3 const*>(p.x), Stride<int64_t, Int<1>, int64_t>{p.in_features, {}, 0},
           static_cast<Word const*>(p.group_scales), word_stride, p.tiled_group},
          {Scaling::arguments(p), nullptr, typename Kernel::StrideC{}, static_cast<Out*>(p.out), out_stride}};
}

}  // namespace slipstream

// 0, a cudaError_t, or minus a cutlass::Status.
SLIPSTREAM_API int slipstream_w4a8_gemm(const slipstream::W4a8Params* params, cudaStream_t stream) {
  return slipstream::launch_gemm<slipstream::Gemm>(slipstream::arguments_of(*params), *params, stream);
}
