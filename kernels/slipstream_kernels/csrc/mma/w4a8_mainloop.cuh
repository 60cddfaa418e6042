// The consumer's main loop of the W4A8 GEMM: CUTLASS's collective for mixed inputs brings the tiles (TMA, pipeline,
// shared-memory layouts) and is derived from; only what the multiplying warps do is replaced.
//
// Each 4-bit value q is looked up in a table of 16 e4m3 numbers, round((q - zero point) * scale), of its row and group.  Tables are
// built in registers from one 32-bit word per row and group (fp16 512 * scale, fp16 -zero / 512 above it), by four lanes
// that share a row: so zero points cost nothing, and 4 bytes per group travel where CUTLASS's own table needs 8 and takes
// none.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"

#include "formats/int4_table.cuh"

namespace slipstream {

// GROUPS: groups per tile of 128 input features (1 or 2); Base's scale type is uint32_t or uint64_t accordingly.
template <class Base, int GROUPS>
struct TableMainloop : Base {
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TileShape;
  using typename Base::TiledMma;

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& sums, int num_tiles,
                          int thread, TensorStorage& shared, Params const&) {
    using namespace cute;
    Tensor shared_a = as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(shared.smem_A.begin()), typename Base::SmemLayoutA{}));
    Tensor shared_b = make_tensor(make_smem_ptr(shared.smem_B.begin()), typename Base::SmemLayoutB{});
    Tensor scales = make_tensor(make_smem_ptr(shared.smem_scale.begin()), typename Base::SmemLayoutScale{});

    TiledMma mma;
    auto slice = mma.get_thread_slice(thread);
    Tensor qweight_in = slice.partition_A(shared_a);
    const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
    auto group_slice = mma.get_slice(make_layout(Int<size(TiledMma{}) / 128>{}, Int<128>{})(warpgroup));
    Tensor b = group_slice.make_fragment_B(group_slice.partition_B(shared_b));
    auto copy_a = make_tiled_copy_A(typename Base::SwappedSmemCopyAtomA{}, mma);
    auto copy_slice = copy_a.get_thread_slice(thread % 128);

    Tensor qweight = make_tensor_like<typename Base::RealSwappedElementA>(qweight_in(_, _, _, _0{}));
    Tensor qweight_out = copy_slice.retile_D(qweight);
    Tensor a = slice.partition_fragment_A(shared_a(_, _, _0{}));
    constexpr int STEPS = size<2>(qweight), ROWS = size<1>(qweight);
    static_assert(STEPS == 4 && size<0>(qweight) == 16);

    Tensor where = slice.partition_C(make_identity_tensor(select<0, 1>(TileShape{})));
    uint4 tables[ROWS][2], following[ROWS][2];   // of the values that are converted now, and next

    auto build_tables = [&](int group, int stage) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < ROWS; ++i)
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const auto word = scales(get<0>(where(make_coord(0, half, 0), i, 0)), _0{}, stage);
          following[i][half] = table_of(uint32_t(word >> (GROUPS > 1 ? 32 * group : 0)));
        }
    };
    auto use_tables = [&]() {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < ROWS; ++i) tables[i][0] = following[i][0], tables[i][1] = following[i][1];
    };
    auto load = [&](int step, int stage) { copy(copy_a, qweight_in(_, _, step, stage), qweight_out(_, _, step)); };
    auto convert = [&](int step) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < ROWS; ++i) {
        Tensor q = recast<uint32_t>(qweight(_, i, step));
        Tensor out = recast<uint32_t>(a(_, i, step));
        static_assert(size(q) == 2 && size(out) == 4);
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {  // a word for row l / 4, one for row l / 4 + 8
          look_up_operands(q(half), tables[i][half], out(half), out(half + 2));
        }
      }
    };

    PipelineState done = read;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
    build_tables(0, read.index());
    use_tables();
    load(0, read.index());
    load(1, read.index());
    convert(0);
    warpgroup_fence_operand(sums);

    // The next tile's tables and first weights are fetched while this one is multiplied: their latency would be the
    // loop's.
    auto multiply_tile = [&](bool is_first, bool is_last) {
      const int stage = read.index();
      ++read;
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < STEPS; ++step) {
        warpgroup_arrive();
        cute::gemm(mma, a(_, _, step), b(_, _, step, stage), sums);
        mma.accumulate_ = GMMA::ScaleOut::One;
        warpgroup_commit_batch();
        if (step == 0) {
          load(2, stage);
          load(3, stage);
          if (GROUPS > 1) build_tables(1, stage);
        }
        if (step == 1 && GROUPS > 1) use_tables();
        if (step == 1 && !is_last) {
          pipeline.consumer_wait(read, pipeline.consumer_try_wait(read));
          load(0, read.index());
          if (GROUPS == 1) build_tables(0, read.index());
        }
        if (step == 2 && !is_last) {
          load(1, read.index());
          if (GROUPS > 1) build_tables(0, read.index());
        }
        warpgroup_wait<STEPS - 1>();  // the products that read the registers which are written next have ended
        if (step == STEPS - 1) {
          if (!is_first) {
            pipeline.consumer_release(done);
            ++done;
          }
          use_tables();
        }
        if (step < STEPS - 1 || !is_last) convert((step + 1) % STEPS);
      }
    };
    if (num_tiles == 1) {
      multiply_tile(true, true);
    } else {
      multiply_tile(true, false);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int tile = 2; tile < num_tiles; ++tile) multiply_tile(false, false);
      multiply_tile(false, true);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    pipeline.consumer_release(done);
  }

  // Every stage is released in mma().
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

}  // namespace slipstream
