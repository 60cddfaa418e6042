// The warpgroups of a prefill kernel that multiply: 64 rows of queries each, by tiles of keys from the last, which has a
// mask, to the first. While a warpgroup computes the softmax of one tile of scores, the tensor cores multiply the values
// of its last one, and what the other warpgroups ask for (FlashAttention-3, arXiv:2407.08608; their turns by barriers
// gained nothing here).
#pragma once

#include "mma/prefill_rows.cuh"

namespace slipstream {

template <typename SHAPE>
struct PrefillConsumer : PrefillRows<SHAPE> {
  using Rows = PrefillRows<SHAPE>;
  using typename Rows::Element;
  using typename Rows::KeyOperand;
  using typename Rows::Operand;
  using Rows::begin_tile, Rows::end_tile, Rows::facts, Rows::key_place, Rows::kOutputs, Rows::kScores, Rows::memory;
  using Rows::out, Rows::p, Rows::release, Rows::state, Rows::value_place, Rows::warpgroup;
  using Rows::work;

  static constexpr int kPartOutputs = kOutputs / SHAPE::kOutputParts;   // of one product with values

  float scores[kScores];
  uint32_t probs[kScores / 2];

  __device__ __forceinline__ void run() {
    this->serve([this] { attend(); });
  }

 private:
  __device__ __forceinline__ void attend() {
    if (!this->prepare()) return;
    const auto whole = this->whole_tiles();
    begin();
#pragma unroll 1
    for (int tile = end_tile - 2; tile >= begin_tile; --tile) step(tile, !whole.hold(tile));
    wait_barrier(memory.value_filled(value_place.stage), value_place.parity);
    multiply_values();
    wait_for_products<0>();
    pin(out);
    release(memory.value_emptied(value_place.stage));
    value_place.advance();
  }

  // The last tile's scores: nothing to overlap them with.
  __device__ __forceinline__ void begin() {
    this->await_queries();
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
    const bool moves = follow(tile, is_masked, rescale);
    wait_for_products<0>();
    pin(out);
    pin(probs);
    release(memory.value_emptied(value_place.stage));
    value_place.advance();
    if (moves) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] *= rescale[i / 2 % 2];
    }
    pack_probs();
  }

  // As RowState's.
  __device__ __forceinline__ bool follow(int tile, bool is_masked, float (&rescale)[2]) {
    const int first_key = tile * SHAPE::kKeys;
    float factor[2];
    finish_scores<SHAPE::kHasSoftCap, SHAPE::kHasAlibi>(p, facts, first_key, scores, factor);
    if (is_masked) mask_scores(p, facts, first_key, scores);
    return state.follow(scores, factor, rescale);
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
#pragma unroll
      for (int part = 0; part < SHAPE::kOutputParts; ++part) {
        auto& of_part = reinterpret_cast<float(&)[kPartOutputs]>(out[part * kPartOutputs]);
        const int slab = part * SHAPE::kSlabs / SHAPE::kOutputParts, row = 16 * k;
        const uint64_t from = values + ((slab * SHAPE::kKeySlab + row * kSwizzleBytes) >> 4);
        multiply_columns<Operand>(of_part, probs + 4 * k, from);
      }
    }
    commit_products();
  }

  // Probabilities in the layout of a wgmma operand in registers: pairs of the accumulator's columns.
  __device__ __forceinline__ void pack_probs() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) probs[i] = pack<Operand>(scores[2 * i], scores[2 * i + 1]);
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
};

}  // namespace slipstream
