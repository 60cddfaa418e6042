// The warpgroups of a prefill kernel that multiply, with both products in e4m3: probabilities are rounded, too.
//
// The tensor cores add e4m3 products with about 14 bits of fraction, too few for the sums of a long prompt (6 % off
// after 64k keys whose values have a mean). So the values of each tile are summed on their own and added in fp32.
// These sums lie where scores were: the scores of a tile are two halves, and each warpgroup has
//   the products of one half's values under way while it takes exponents of the other, and
//   the scores of the next tile while it adds up values.
// Ordered barriers (CUTLASS's OrderedSequenceBarrier) let one warpgroup at a time take exponents: side by side both
// would wait for the same units, and then for the tensor cores.
#pragma once

#include "mma/prefill_rows.cuh"

namespace slipstream {

// Named barriers behind those of the warpgroups: one for each consumer that may take exponents next.
constexpr int kOrderBarrier = kWarpgroupBarrier + 3;

template <typename SHAPE>
struct PrefillFp8Consumer : PrefillRows<SHAPE> {
  using Rows = PrefillRows<SHAPE>;
  using Rows::begin_tile, Rows::end_tile, Rows::facts, Rows::key_place, Rows::kOutputs, Rows::memory, Rows::out;
  using Rows::p, Rows::release, Rows::state, Rows::value_place, Rows::warpgroup;
  static constexpr int kHalf = SHAPE::kKeys / 2;   // keys
  static constexpr int kScores = kHalf / 2;
  static constexpr int kBlock = SHAPE::kHeadDim << kStagedRowsLog2;  // bytes of a staged block of values
  static_assert(kScores == kOutputs, "a half's scores make room for the sums of its values");
  static_assert(!SHAPE::kHasSoftCap && !SHAPE::kHasAlibi, "source_of_keys_and_values sends these elsewhere");
  using Half = float[kScores];

  Half even, odd;
  uint32_t probs[2][kScores / 4];

  __device__ __forceinline__ void run() {
    if (consumer_index() == 1) arrive_order();
    this->serve([this] { attend(); });
  }

 private:
  __device__ __forceinline__ void wait_order() const {
    sync_threads(kOrderBarrier + consumer_index(), 256);
  }

  __device__ __forceinline__ void arrive_order() const {
    arrive_threads(kOrderBarrier + 1 - consumer_index(), 256);
  }

  // Of two, found anew each time: registers are short.
  __device__ __forceinline__ static int consumer_index() {
    static_assert(SHAPE::kWarpgroups == 2, "");
    return static_cast<int>(threadIdx.x / 128) - SHAPE::kFirstMultiplier;
  }

  __device__ __forceinline__ void attend() {
    if (!this->prepare()) return;
    this->await_queries();
    wait_barrier(memory.key_filled(key_place.stage), key_place.parity);
    multiply_scores<0>(even);
    multiply_scores<1>(odd);
    int tile = end_tile - 1;
    step(even, odd, tile);
    // The next tile's scores of the first half are where the last one's second half was.
#pragma unroll 1
    while (tile > begin_tile) {
      --tile;
      step(odd, even, tile);
      if (tile == begin_tile) break;
      --tile;
      step(even, odd, tile);
    }
    wait_for_products<0>();  // none is under way, which the compiler does not see
  }

  // first, second: scores of the tile's halves, under way; at the end those of the next tile, second half first.
  __device__ __forceinline__ void step(Half& first, Half& second, int tile) {
    const bool is_last = tile == begin_tile;
    wait_for_products<0>();
    pin(first);
    pin(second);
    if (is_last) release(memory.query_emptied());
    release(memory.key_emptied(key_place.stage));
    key_place.advance();
    float rescale[2], shift[2];
    settle(first, second, tile, rescale, shift);
    wait_order();
    pin(first);
    state.exponentiate(first, facts.factor, shift);
    pack_probs<0>(first);
    wait_barrier(memory.value_filled(value_place.stage), value_place.parity);
    multiply_values<0>(first);
    state.exponentiate(second, facts.factor, shift);
    pack_probs<1>(second);
    arrive_order();
    multiply_values<1>(first);
    if (is_last) {
      wait_for_products<0>();
    } else {
      wait_barrier(memory.key_filled(key_place.stage), key_place.parity);
      multiply_scores<0>(second);
      wait_for_products<1>();
    }
    pin(first);
    pin(probs[0]);
    pin(probs[1]);
    release(memory.value_emptied(value_place.stage));
    value_place.advance();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = __fmaf_rn(out[i], rescale[i / 2 % 2], first[i]);
    if (!is_last) multiply_scores<1>(first);
  }

  __device__ __forceinline__ void settle(Half& first, Half& second, int tile, float (&rescale)[2], float (&shift)[2]) {
    // Read and made anew for each tile: registers are short.
    if (!this->whole_tiles().hold(tile)) {
      RowFacts rows;
      rows.load<false>(p, this->work(), warpgroup);
      const int first_key = tile * SHAPE::kKeys;
      mask_scores(p, rows, first_key, first);
      mask_scores(p, rows, first_key + kHalf, second);
    }
    float top[2] = {kNothing, kNothing};
    state.raise(first, top);
    state.raise(second, top);
    state.follow_top(top, facts.factor, SHAPE::kFp8ProbsAbove, rescale, shift);
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] -= SHAPE::kProbsLog2;
  }

  template <int HALF>
  __device__ __forceinline__ void multiply_scores(Half& scores) {
    const uint64_t queries = rows_operand(memory.queries() + warpgroup * 64 * kSwizzleBytes);
    const uint64_t keys = rows_operand(memory.keys(key_place.stage) + HALF * kHalf * kSwizzleBytes);
    pin(scores);
    begin_products();
    multiply_rows<__nv_fp8_e4m3, false>(scores, queries, keys);
#pragma unroll
    for (int k = 1; k < 4; ++k) multiply_rows<__nv_fp8_e4m3, true>(scores, queries + 2 * k, keys + 2 * k);
    commit_products();
  }

  // Of the second half to the sums of the first, which is still under way: nothing may touch these.
  template <int HALF>
  __device__ __forceinline__ void multiply_values(Half& sums) {
    const uint32_t address = memory.values(value_place.stage) + HALF * (kHalf >> kStagedRowsLog2) * kBlock;
    const uint64_t values = narrow_rows_operand(address);
    if (HALF == 0) pin(sums);
    pin(probs[HALF]);
    begin_products();
#pragma unroll
    for (int k = 0; k < kHalf / 32; ++k) {
      const uint64_t at = values + ((k / 2 * kBlock + k % 2 * 32) >> 4);
      if (k == 0) multiply_fp8_values<HALF != 0>(sums, probs[HALF], at);
      else multiply_fp8_values<true>(sums, probs[HALF] + 4 * k, at);
    }
    commit_products();
  }

  // As an operand in registers: four neighbouring columns are two pairs of scores, eight keys apart. The order of keys
  // that this makes is that of staged values (staged_order of stage_fp8.py).
  template <int HALF>
  __device__ __forceinline__ void pack_probs(const Half& s) {
#pragma unroll
    for (int w = 0; w < kScores / 4; ++w) {
      const int i = 16 * (w / 4) + 8 * (w / 2 % 2) + 2 * (w % 2);
      probs[HALF][w] = pack_e4m3(make_float2(s[i], s[i + 1]), make_float2(s[i + 4], s[i + 5]));
    }
  }
};

}  // namespace slipstream
