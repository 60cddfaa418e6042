// The warpgroups of a prefill kernel that multiply: 64 rows of queries each, by tiles of keys from the last, which has a
// mask, to the first. While a warpgroup computes the softmax of one tile of scores, the tensor cores multiply the values
// of its last one, and what the other warpgroups ask for (FlashAttention-3, arXiv:2407.08608; their turns by barriers
// gained nothing here).
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
struct PrefillConsumer {
  using Element = typename SHAPE::Element;
  using Operand = typename SHAPE::Operand;
  using KeyOperand = typename SHAPE::KeyOperand;
  static constexpr int kScores = SHAPE::kKeys / 2;
  static constexpr int kOutputs = SHAPE::kHeadDim / 2;

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
  float scores[kScores];
  uint32_t probs[kScores / 2];

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (receive()) {
      attend();
      if (merge_splits()) store();
      memory.give_back(slot);
    }
  }

 private:
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) arrive(barrier);
  }

  // Read where it lies when it is needed: registers are short in between.
  __device__ __forceinline__ const Work& work() const { return *memory.work(slot.stage); }

  __device__ __forceinline__ bool receive() {
    memory.await(slot);
    return work().head >= 0;
  }

  __device__ __forceinline__ void attend() {
    state = RowState();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    const Work work = this->work();
    begin_tile = work.begin_tile, end_tile = work.end_tile;
    if (begin_tile >= end_tile) return;
    facts.load<SHAPE::kHasAlibi>(p, work, warpgroup);
    facts.factor[0] = facts.factor[1] = p.scale * head_scale(p.key_scale) * kLog2E;
    if constexpr (SHAPE::kIsRagged) SHAPE::place_rows(p, work, facts);
    const int first_position = SHAPE::first_position(p, work) + (work.first_row >> p.pack_log2);
    const int last_position = work.seq_len - work.query_len + ((work.first_row + SHAPE::kRows - 1) >> p.pack_log2);
    // Tiles in [whole_begin, whole_end) hide no key from any row.
    const int whole_end = (first_position + 1) / SHAPE::kKeys;
    const int whole_begin =
        p.sliding_window > 0 ? (max(last_position - p.sliding_window + 1, 0) + SHAPE::kKeys - 1) / SHAPE::kKeys : 0;
    begin();
#pragma unroll 1
    for (int tile = end_tile - 2; tile >= begin_tile; --tile) {
      step(tile, tile >= whole_end || tile < whole_begin);
    }
    wait_barrier(memory.value_filled(value_place.stage), value_place.parity);
    multiply_values();
    wait_for_products<0>();
    pin(out);
    release(memory.value_emptied(value_place.stage));
    value_place.advance();
  }

  __device__ __forceinline__ float head_scale(const float* scales) const {
    if (!SHAPE::kHasHeadScales || scales == nullptr) return 1.0f;
    return scales[(work().head << p.pack_log2) / (p.num_q_heads / p.num_kv_heads)];
  }

  // The last tile's scores: nothing to overlap them with.
  __device__ __forceinline__ void begin() {
    wait_barrier(memory.query_filled(), query_place.parity);
    query_place.advance();
    if constexpr (!std::is_same_v<Element, KeyOperand>) convert_queries();
    wait_barrier(memory.key_filled(key_place.stage), key_place.parity);
    multiply_scores();
    wait_for_products<0>();
    pin(scores);
    const int tile = end_tile - 1;
    if (tile == begin_tile) release(memory.query_emptied());
    release(memory.key_emptied(key_place.stage));
    key_place.advance();
    float rescale[2];
    follow(tile, true, rescale);
    pack_probs();
    const int seq_len = work().seq_len;
    const bool has_tail = seq_len % (1 << p.block_size_log2) != 0 && seq_len < end_tile * SHAPE::kKeys;
    if (std::is_same_v<Element, Operand> && !SHAPE::kHasStagedValues && has_tail) clear_tail(tile);
  }

  __device__ __forceinline__ void step(int tile, bool is_masked) {
    wait_barrier(memory.key_filled(key_place.stage), key_place.parity);
    multiply_scores();
    wait_barrier(memory.value_filled(value_place.stage), value_place.parity);
    multiply_values();
    wait_for_products<1>();
    pin(scores);
    if (tile == begin_tile) release(memory.query_emptied());
    release(memory.key_emptied(key_place.stage));
    key_place.advance();
    float rescale[2];
    follow(tile, is_masked, rescale);
    wait_for_products<0>();
    pin(out);
    pin(probs);
    release(memory.value_emptied(value_place.stage));
    value_place.advance();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= rescale[i / 2 % 2];
    pack_probs();
  }

  __device__ __forceinline__ void follow(int tile, bool is_masked, float (&rescale)[2]) {
    const int first_key = tile * SHAPE::kKeys;
    float factor[2];
    finish_scores<SHAPE::kHasSoftCap, SHAPE::kHasAlibi>(p, facts, first_key, scores, factor);
    if (is_masked) mask_scores(p, facts, first_key, scores);
    state.follow(scores, factor, rescale);
  }

  __device__ __forceinline__ void multiply_scores() {
    const uint64_t queries = rows_operand(memory.queries() + warpgroup * 64 * kSwizzleBytes);
    const uint64_t keys = rows_operand(memory.keys(key_place.stage));
    pin(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4 * SHAPE::kKeySlabs; ++k) {
      const uint64_t query = queries + ((k / 4 * SHAPE::kQuerySlab + k % 4 * 32) >> 4);
      const uint64_t key = keys + ((k / 4 * SHAPE::kKeySlab + k % 4 * 32) >> 4);
      if (k == 0) multiply_rows<KeyOperand, false>(scores, query, key);
      else multiply_rows<KeyOperand, true>(scores, query, key);
    }
    commit_products();
  }

  __device__ __forceinline__ void multiply_values() {
    const uint64_t values = columns_operand(memory.values(value_place.stage), SHAPE::kKeySlab);
    pin(out);
    pin(probs);
    begin_products();
#pragma unroll
    for (int k = 0; k < SHAPE::kKeys / 16; ++k) {
      multiply_columns<Operand>(out, probs + 4 * k, values + ((k * 16 * kSwizzleBytes) >> 4));
    }
    commit_products();
  }

  // Probabilities in the layout of a wgmma operand in registers: pairs of the accumulator's columns.
  __device__ __forceinline__ void pack_probs() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) probs[i] = pack<Operand>(scores[2 * i], scores[2 * i + 1]);
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

  // Slots of the last block that the sequence has not reached may hold NaN, which a probability of 0 would not stop.
  // Every warpgroup clears them for itself: all write the same.
  __device__ __forceinline__ void clear_tail(int tile) {
    wait_barrier(memory.value_filled(value_place.stage), value_place.parity);
    const int seq_len = work().seq_len;
    const int block_mask = (1 << p.block_size_log2) - 1;
    const int first = seq_len - tile * SHAPE::kKeys;
    const int end = min(((seq_len + block_mask) & ~block_mask) - tile * SHAPE::kKeys, SHAPE::kKeys);
    char* values = memory.pointer(memory.values(value_place.stage));
    for (int i = threadIdx.x % 128; i < (end - first) * 8 * SHAPE::kSlabs; i += 128) {
      const int row = first + i / 8 / SHAPE::kSlabs, slab = i / 8 % SHAPE::kSlabs;
      *reinterpret_cast<uint4*>(values + slab * SHAPE::kKeySlab + row * kSwizzleBytes + i % 8 * 16) = uint4{};
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
      if (state.maximum[r] != kNothing) state.maximum[r] *= factor;
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
    for (int r = 0; r < 2; ++r) store_row(to[r], is_row[r], out, r, inverse[r]);
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
