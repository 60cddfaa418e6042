// What all warpgroups of a prefill kernel that multiply do: they receive tiles of 64 rows of queries each, bring
// queries to the product's type, and store outputs.
#pragma once

#include <type_traits>

#include "epilogue/prefill_merge.cuh"
#include "epilogue/quad_transpose.cuh"
#include "mma/prefill_softmax.cuh"
#include "pipeline/prefill_queries.cuh"

namespace slipstream {

// Named barriers: one per warpgroup.
constexpr int kWarpgroupBarrier = 1;

template <typename SHAPE>
struct PrefillRows {
  using Element = typename SHAPE::Element;
  using Operand = typename SHAPE::Operand;
  using KeyOperand = typename SHAPE::KeyOperand;
  static constexpr int kScores = SHAPE::kKeys / 2;
  static constexpr int kOutputs = SHAPE::kTileDim / 2;

  const typename SHAPE::Params& p;
  PrefillMemory<SHAPE> memory;
  int warpgroup;
  PipelineState<SHAPE::kStages> key_place, value_place;
  PipelineState<2> slot;
  PipelineState<1> query_place;
  int begin_tile, end_tile;
  RowFacts facts;
  RowState state;
  float out[kOutputs];

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) arrive(barrier);
  }

  // Read where it lies when it is needed: registers are short in between.
  __device__ __forceinline__ const Work& work() const { return *memory.work(slot.stage); }

  __device__ __forceinline__ bool receive() {
    memory.await(slot);
    return work().head >= 0;
  }

  // Tiles of rows until none is left.
  template <typename ATTEND>
  __device__ __forceinline__ void serve(const ATTEND& attend) {
#pragma unroll 1
    while (receive()) {
      attend();
      if (merge_splits()) store();
      memory.give_back(slot);
    }
  }

  // Makes ready for the next rows. False: they see no keys.
  __device__ __forceinline__ bool prepare() {
    state = RowState();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    const Work work = this->work();
    begin_tile = work.begin_tile, end_tile = work.end_tile;
    if (begin_tile >= end_tile) return false;
    facts.template load<SHAPE::kHasAlibi>(p, work, warpgroup);
    facts.factor[0] = facts.factor[1] = p.scale * head_scale(p.key_scale) * kLog2E;
    if constexpr (SHAPE::kIsRagged) SHAPE::place_rows(p, work, facts);
    return true;
  }

  // Tiles in [begin, end) hide no key from any row.
  struct WholeTiles {
    int begin, end;
    __device__ __forceinline__ bool hold(int tile) const { return tile >= begin && tile < end; }
  };

  __device__ __forceinline__ WholeTiles whole_tiles() const {
    const Work work = this->work();
    const int first_position = SHAPE::first_position(p, work) + (work.first_row >> p.pack_log2);
    const int last_position = work.seq_len - work.query_len + ((work.first_row + SHAPE::kRows - 1) >> p.pack_log2);
    const int hidden = p.sliding_window > 0 ? max(last_position - p.sliding_window + 1, 0) : 0;
    return {(hidden + SHAPE::kKeys - 1) / SHAPE::kKeys, (first_position + 1) / SHAPE::kKeys};
  }

  __device__ __forceinline__ float head_scale(const float* scales) const {
    if (!SHAPE::kHasHeadScales || scales == nullptr) return 1.0f;
    return scales[(work().head << p.pack_log2) / (p.num_q_heads / p.num_kv_heads)];
  }

  __device__ __forceinline__ void await_queries() {
    wait_barrier(memory.query_filled(), query_place.parity);
    query_place.advance();
    if constexpr (!std::is_same_v<Element, KeyOperand>) convert_queries();
  }

  // This warpgroup's rows, where they lie, from their own type to the operand's.
  __device__ __forceinline__ void convert_queries() {
    char* rows = memory.pointer(memory.queries() + warpgroup * 64 * kSwizzleBytes);
    if constexpr (SHAPE::kHasFp8Keys) {
      float unit[2];
      round_queries<Element, SHAPE::kQuerySlab>(rows, unit);
#pragma unroll
      for (int r = 0; r < 2; ++r) facts.factor[r] *= unit[r];
    } else {
      queries_to_half<SHAPE::kQuerySlab, SHAPE::kSlabs>(rows);
    }
    fence_shared_for_engines();
    sync_threads(kWarpgroupBarrier + warpgroup, 128);
  }

  // False if the warp of another CTA stores the rows: prefill_merge.cuh.
  __device__ __forceinline__ bool merge_splits() {
    if constexpr (SHAPE::kIsRagged) return true;
    const Work& work = this->work();
    if (work.num_splits() == 1 && p.sinks == nullptr) return true;
    // Maxima in exponents of base 2, as finish_scores' factors make them.
    const float unit = SHAPE::kHasAlibi ? 1.0f : kLog2E;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = SHAPE::kHasSoftCap || SHAPE::kHasAlibi ? unit : facts.factor[r];
      if (state.maximum[r] != kNothing) state.maximum[r] = state.maximum[r] * factor - SHAPE::kProbsLog2;
    }
    return work.num_splits() == 1 || SplitMerger<SHAPE>{p, work, warpgroup}.run(state, out);
  }

  __device__ __forceinline__ void store() const {
    const Work work = this->work();
    Element* to[2];
    float inverse[2];
    bool is_row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.first_row + warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      const int token = row >> p.pack_log2, head = (work.head << p.pack_log2) + (row & ((1 << p.pack_log2) - 1));
      const float sink = p.sinks == nullptr ? kNothing : p.sinks[head] * kLog2E;
      inverse[r] = inverse_normaliser(state.total(r), state.maximum[r], sink) * head_scale(p.value_scale);
      is_row[r] = token < work.query_len;
      if constexpr (SHAPE::kIsRagged) store_lse(work, token, r);
      to[r] = static_cast<Element*>(p.out) +
              (static_cast<int64_t>(work.start + token) * p.num_q_heads + head) * SHAPE::kHeadDim;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) store_row<SHAPE::kHeadDim>(to[r], is_row[r], out, r, inverse[r]);
  }

  // Of a row over its keys: the logarithm of the sum of exponentials, which later pieces of keys are merged by.
  __device__ __forceinline__ void store_lse(const Work& work, int token, int r) const {
    const float total = state.total(r);
    if (token >= work.query_len || threadIdx.x % 4 != 0) return;
    const float lse = (state.maximum[r] * facts.factor[r] + __log2f(total)) / kLog2E;
    p.lse[static_cast<int64_t>(work.start + token) * p.num_q_heads + work.head] = total == 0.0f ? kNothing : lse;
  }
};

}  // namespace slipstream
