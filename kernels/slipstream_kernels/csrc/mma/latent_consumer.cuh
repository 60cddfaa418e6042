// The two warpgroups of latent attention that multiply. Both attend the same 64 rows; warpgroup w holds the sums of
// output columns 256 w to 256 w + 255, for 64 x 512 sums of fp32 fill half of an SM's registers.
//
// They take tiles of keys in turns: warpgroup w computes the scores and probabilities of tiles w, w + 2 and so on, multiplies
// them by its columns of the tile's values, and leaves them for the other, which multiplies them by its own. The idea is that
// of FlashMLA's published description ("seesaw"); here each tile only follows the one before it, so that the warpgroups stay
// half a tile apart: one's softmax and its wait for copies lie beside the other's products.
//
// Order in a tile t: the scores' products with the columns that the warpgroup itself gave back; the other's probabilities of
// tile t - 1 times values, which gives these back early; the rest of the scores; softmax; its own probabilities times values.
#pragma once

#include "epilogue/latent_join.cuh"
#include "epilogue/latent_store.cuh"
#include "mma/draft_mask.cuh"
#include "mma/wgmma_fragments.cuh"
#include "mma/wgmma_shared.cuh"
#include "mma/wgmma_values.cuh"
#include "schedule/latent_shape.cuh"

namespace slipstream {

// Named barriers; the first and the last: + warpgroup.
constexpr int kProbs = 1, kAllSums = 3, kTailCleared = 4;

template <int W>
struct LatentConsumer {
  using Shape = LatentShape;
  using Operand = __nv_bfloat16;
  static constexpr int kOther = 1 - W;
  static constexpr int kPair = 256;   // threads of both warpgroups

  const LatentParams& p;
  LatentMemory memory;
  uint32_t place = row_of(0) * kSwizzleBytes + row_of(0) % 8 * 16 + lane() % 4 * 4;
  uint32_t query_parity = 0, key_parity = 0;
  int end, prefix;           // of the unit's tiles; of the keys that all rows see
  RowState state;
  float out[Shape::kValueDim / 4];
  float scores[Shape::kKeys / 2];
  uint32_t probs[Shape::kKeys / 4];
  uint32_t queries[16];      // the last slab, as operands

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (receive()) {
      bool follows = W == 1;   // whether a tile of the other's comes before this one
      int tile = work().begin + W;
#pragma unroll 1
      for (; tile < end; tile += 2) {
        attend(tile, follows);
        follows = true;
      }
      if (tile == end) attend_last();
      finish();
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int row_of(int r) { return threadIdx.x % 128 / 32 * 16 + lane() / 4 + 8 * r; }
  // Where a slab has 16 bytes of this thread's row r, and of them the thread's pair: under the swizzle.
  __device__ __forceinline__ uint32_t place_of(int r, int part) const { return (place ^ part << 4) + r * kSwizzleUnit; }
  // Else the compiler computes all places before the loops, which leave no registers for them.
  __device__ __forceinline__ void forget_places() { asm volatile("" : "+r"(place)); }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane() == 0) arrive(barrier);
  }

  // Read where it lies when it is needed: registers are short in between.
  __device__ __forceinline__ const LatentWork& work() const { return memory.work(query_parity); }

  // False if nothing is left. The last slab of queries lies where warpgroup 0 writes probabilities, which it does not before
  // the other has read it: that says so as if it had left a tile.
  __device__ __forceinline__ bool receive() {
    forget_places();
    wait_barrier(memory.query_filled(), query_parity);
    if (work().request < 0) return false;
    end = work().end, prefix = work().prefix();
    state = RowState();
#pragma unroll
    for (float& value : out) value = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      queries[i] = load_shared_4(memory.queries(Shape::kSlabs - 1) + place_of(i % 2, 2 * (i / 4) + i / 2 % 2));
    }
    if constexpr (W == 1) {
      const float kept[2] = {1.0f, 1.0f};
      leave_state(kept);
      arrive_threads(kProbs + W, kPair);
    }
    return true;
  }

  // One tile. Nothing is under way before and after it, or the compiler would take products one by one.
  // follows: a tile of the other's comes before it.
  __device__ __forceinline__ void attend(int tile, bool follows) {
    forget_places();
    multiply_own_columns();
    begin_others(follows);
    multiply_slabs<kOther>();
    commit_products();
    wait_for_products<1>();
    pin(out);
    if (follows) release(memory.emptied(kOther, W));
    wait_for_products<0>();
    pin(scores);
    pin(queries);
    release(memory.emptied(W, 2));
    key_parity ^= 1;
    if ((tile + 1) * Shape::kKeys > prefix) hide(tile);
    leave_probs();
    multiply_own();
    wait_for_products<0>();
    pin(out);
    pin(probs);
    release(memory.emptied(W, W));
  }

  // A last tile that is the other's.
  __device__ __forceinline__ void attend_last() {
    begin_others(true);
    wait_for_products<0>();
    pin(out);
    release(memory.emptied(kOther, W));
  }

  // Scores of the rotated slab and of the columns that this warpgroup gave back itself.
  __device__ __forceinline__ void multiply_own_columns() {
    pin(scores);
    wait_barrier(memory.rope_filled(W), key_parity);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply_fragment<Operand, Shape::kKeys>(scores, queries + 4 * k,
                                               rows_operand(memory.keys(W, Shape::kSlabs - 1)) + (k * 32 >> 4), k > 0);
    }
    multiply_slabs<W>();
    commit_products();
    wait_for_products<0>();
    pin(scores);
  }

  // Of the columns of warpgroup OF's outputs.
  template <int OF>
  __device__ __forceinline__ void multiply_slabs() {
#pragma unroll
    for (int slab = 4 * OF; slab < 4 * OF + 4; ++slab) {
      if (slab % 2 == 0) wait_barrier(memory.filled(W, slab / 2), key_parity);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        multiply_shared<Operand, Shape::kKeys>(scores, rows_operand(memory.queries(slab)) + (k * 32 >> 4),
                                               rows_operand(memory.keys(W, slab)) + (k * 32 >> 4), 1);
      }
    }
  }

  // Brings sums to what the other's last tile lowered exponents by, and begins to add its product, if there is such a tile.
  __device__ __forceinline__ void begin_others(bool follows) {
    sync_threads(kProbs + kOther, kPair);
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) rescale[r] = take_state(r);
    if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) scale_outputs(rescale);
    pin(out);
    if (follows) multiply_other();
  }

  __device__ __forceinline__ void hide(int tile) {
    const LatentWork work = this->work();
    const int64_t* tree_mask = p.tree_mask == nullptr ? nullptr : p.tree_mask + work.start;
    DraftMask(tree_mask, work.query_len, work.first_row, p.num_heads).hide(tile * Shape::kKeys - prefix, scores);
    const int num_rows = work.seq_len - tile * Shape::kKeys;
    if (num_rows < Shape::kKeys) clear_tail(max(num_rows, 0));
  }

  // Slots that the sequence has not reached may hold NaN, which a probability of 0 would not stop.
  __device__ __forceinline__ void clear_tail(int num_rows) const {
    char* values = memory.base + (memory.keys(W, 0) - memory.address);
    for (int i = threadIdx.x % 128; i < (Shape::kKeys - num_rows) * 8 * Shape::kValueSlabs; i += 128) {
      const int row = num_rows + i / 8 / Shape::kValueSlabs, slab = i / 8 % Shape::kValueSlabs;
      *reinterpret_cast<uint4*>(values + slab * Shape::kSlabBytes + row * kSwizzleBytes + i % 8 * 16) = uint4{};
    }
    fence_shared_for_engines();
    sync_threads(kTailCleared + W, 128);
  }

  // The tile's probabilities: in registers, and for the other.
  __device__ __forceinline__ void leave_probs() {
    const float factor[2] = {p.scale * kLog2E, p.scale * kLog2E};
    float rescale[2];
    const bool moves = state.follow(scores, factor, rescale);
    forget_places();
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 4; ++i) {
      probs[i] = pack<Operand>(scores[2 * i], scores[2 * i + 1]);
      store_shared_4(memory.probs(W) + place_of(i % 2, i / 2), probs[i]);
    }
    leave_state(rescale);
    fence_shared_for_engines();
    arrive_threads(kProbs + W, kPair);
    if (moves) scale_outputs(rescale);
    pin(out);
  }

  // To and from the other warpgroup: a row's maximum, and the factor of all sums that came before it.
  __device__ __forceinline__ void leave_state(const float (&rescale)[2]) const {
    if (lane() % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) store_shared_8(memory.state(W, row_of(r)), state.maximum[r], rescale[r]);
  }

  __device__ __forceinline__ float take_state(int r) {
    const uint2 words = load_shared_8(memory.state(kOther, row_of(r)));
    const float rescale = __uint_as_float(words.y);
    state.maximum[r] = __uint_as_float(words.x);
    state.normaliser[r] *= rescale;
    return rescale;
  }

  __device__ __forceinline__ void scale_outputs(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Shape::kValueDim / 4; ++i) out[i] *= factor[i / 2 % 2];
  }

  __device__ __forceinline__ uint64_t values_of(int tile) const {
    return columns_operand(memory.keys(tile, 4 * W), Shape::kSlabBytes);
  }

  // The warpgroup's 256 columns: at once, or in halves where an instruction has registers for 128.
  template <typename PROBS>
  __device__ __forceinline__ void multiply_columns(PROBS probs, uint64_t values) {
    if constexpr (Shape::kIsFp8) {
      multiply_values(reinterpret_cast<float(&)[64]>(out[0]), probs, values);
      multiply_values(reinterpret_cast<float(&)[64]>(out[64]), probs, values + (2 * Shape::kSlabBytes >> 4));
    } else {
      multiply_values(out, probs, values);
    }
  }

  __device__ __forceinline__ void multiply_own() {
    const uint64_t values = values_of(W);
    pin(probs);
    begin_products();
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k) multiply_columns(probs + 4 * k, values + (k * 16 * kSwizzleBytes >> 4));
    commit_products();
  }

  // The other's probabilities and tile. Its copies have arrived: the other has waited for them, and told so since.
  __device__ __forceinline__ void multiply_other() {
    const uint64_t values = values_of(kOther), others = rows_operand(memory.probs(kOther));
    begin_products();
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k) {
      multiply_columns(others + (k * 32 >> 4), values + (k * 16 * kSwizzleBytes >> 4));
    }
    commit_products();
  }

  __device__ __forceinline__ void finish() {
    forget_places();
    release(memory.query_emptied());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = state.total(r);
      if (lane() % 4 == 0) store_shared_4(memory.sum(W, row_of(r)), sum);
    }
    sync_threads(kAllSums, kPair);
    float sums[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = __uint_as_float(load_shared_4(memory.sum(0, row_of(r)))) +
                __uint_as_float(load_shared_4(memory.sum(1, row_of(r))));
    }
    LatentStore{p, work(), 256 * W}.run(state, sums, out);
    if (p.arrivals != nullptr && work().num_parts > 1) {
      LatentJoin{p, work(), static_cast<int>(threadIdx.x % 128) + 128 * W, memory.flag()}.run();
    }
    query_parity ^= 1;
  }
};

}  // namespace slipstream
