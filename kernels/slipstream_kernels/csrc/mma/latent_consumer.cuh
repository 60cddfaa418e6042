// The two warpgroups of latent attention that multiply. Both attend the same 64 rows; warpgroup w holds the sums of
// output columns 256 w to 256 w + 255, for 64 x 512 sums of fp32 fill half of an SM's registers.
//
// They take tiles of keys in pairs. Warpgroup w computes the scores and probabilities of tile w of the pair, multiplies
// them by its columns of that tile's values, and hands them to the other through shared memory. While one computes a
// softmax the tensor cores work for the other. The schedule is that of FlashMLA's published description ("seesaw").
//
// Order in a pair: 0 tells 1 its maxima and factors; 1 answers with its own, and has its probabilities ready; 0 brings its
// probabilities to the latest maxima and has them ready. Then each multiplies the other's.
#pragma once

#include "epilogue/latent_join.cuh"
#include "epilogue/latent_store.cuh"
#include "mma/draft_mask.cuh"
#include "mma/wgmma_fragments.cuh"
#include "mma/wgmma_shared.cuh"
#include "mma/wgmma_values.cuh"
#include "schedule/latent_shape.cuh"

namespace slipstream {

// Named barriers.
constexpr int kFirstState = 1, kSecondState = 2, kFirstProbs = 3, kAllSums = 4, kTailCleared = 5;  // + warpgroup

template <int W>
struct LatentConsumer {
  using Shape = LatentShape;
  using Operand = __nv_bfloat16;
  static constexpr int kOther = 1 - W;
  static constexpr int kPair = 256;   // threads of both warpgroups

  const LatentParams& p;
  LatentMemory memory;
  uint32_t place = row_of(0) * kSwizzleBytes + row_of(0) % 8 * 16 + lane() % 4 * 4;
  uint32_t query_parity = 0, key_parity[2] = {0, 0};
  int end, prefix;           // of the unit's tiles; of the keys that all rows see
  RowState state;
  float out[Shape::kValueDim / 4];
  float scores[Shape::kKeys / 2];
  uint32_t probs[Shape::kKeys / 4];
  uint32_t queries[16];      // the last slab, as operands

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (receive()) {
      int tile = work().begin;
      if (tile + W < end) multiply_scores<false>(tile + W);
#pragma unroll 1
      for (; tile + 1 < end; tile += 2) attend<true>(tile);
      if (tile < end) attend<false>(tile);
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

  // False if nothing is left. The last slab of queries lies where warpgroup 0 writes probabilities, not before both have
  // read it: kSecondState.
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
    return true;
  }

  // One pair of tiles, or the last tile of an odd number. Scores of the warpgroup's own are there, and are those of the
  // next pair afterwards: nothing is under way between pairs, or the compiler would take products one by one.
  template <bool IS_PAIR>
  __device__ __forceinline__ void attend(int tile) {
    forget_places();
    if constexpr (W == 0) lead<IS_PAIR>();
    else follow<IS_PAIR>();
    if (IS_PAIR && tile + 2 + W < end) {
      multiply_scores<true>(tile + 2 + W);
    } else {
      wait_for_products<0>();
      pin(out);
      if (IS_PAIR || W == 1) release(memory.emptied(kOther, W));
    }
  }

  // Warpgroup 0's part.
  template <bool IS_PAIR>
  __device__ __forceinline__ void lead() {
    float rescale[2];
    compute_probs(rescale);
    leave_state(rescale);
    arrive_threads(kFirstState, kPair);
    pack_probs();
    scale_outputs(rescale);
    multiply_own();
    sync_threads(kSecondState, kPair);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rescale[r] = take_state(r);
    }
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 4; ++i) {
      const float factor = rescale[i % 2];
      store_shared_4(memory.probs(W) + place_of(i % 2, i / 2),
                     pack<Operand>(scores[2 * i] * factor, scores[2 * i + 1] * factor));
    }
    fence_shared_for_engines();
    arrive_threads(kFirstProbs, kPair);
    wait_for_products<0>();
    pin(out);
    pin(probs);
    release(memory.emptied(W, W));
    scale_outputs(rescale);
    if (IS_PAIR) multiply_other();
  }

  // Warpgroup 1's part. Not a pair: it has no tile of its own.
  template <bool IS_PAIR>
  __device__ __forceinline__ void follow() {
    sync_threads(kFirstState, kPair);
    float rescale[2] = {1.0f, 1.0f}, all[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      all[r] = take_state(r);
    }
    if (IS_PAIR) {
      compute_probs(rescale);
      pack_probs();
#pragma unroll
      for (int i = 0; i < Shape::kKeys / 4; ++i) {
        store_shared_4(memory.probs(W) + place_of(i % 2, i / 2), probs[i]);
      }
      fence_shared_for_engines();
    }
    leave_state(rescale);
    arrive_threads(kSecondState, kPair);
#pragma unroll
    for (int r = 0; r < 2; ++r) all[r] *= rescale[r];
    scale_outputs(all);
    if (IS_PAIR) multiply_own();
    sync_threads(kFirstProbs, kPair);
    multiply_other();
    if (IS_PAIR) {
      wait_for_products<1>();
      pin(probs);
      release(memory.emptied(W, W));
    }
  }

  // Of the warpgroup's own tile, whose slabs may still arrive: those first that are given back first.
  // IS_OTHERS_PENDING: the products of the other's last tile are under way.
  template <bool IS_OTHERS_PENDING>
  __device__ __forceinline__ void multiply_scores(int tile) {
    const uint32_t parity = key_parity[W];
    key_parity[W] ^= 1;
    pin(scores);
    wait_barrier(memory.filled(W, Shape::kSlabs - 1), parity);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply_fragment<Operand, Shape::kKeys>(scores, queries + 4 * k,
                                               rows_operand(memory.keys(W, Shape::kSlabs - 1)) + (k * 32 >> 4), k > 0);
    }
    // FP8 latents arrive when both have given back all of the tile before: what is awaited here may want this release.
    if (!Shape::kIsFp8) multiply_slabs<4 * W>(parity);
    commit_products();
    if (IS_OTHERS_PENDING) {
      wait_for_products<1>();
      release(memory.emptied(kOther, W));
    }
    if (Shape::kIsFp8) multiply_slabs<4 * W>(parity);
    // These come when the other has given them back, which it does before it awaits those given back above.
    multiply_slabs<4 * kOther>(parity);
    commit_products();
    wait_for_products<0>();
    pin(out);
    pin(scores);
    pin(queries);
    release(memory.emptied(W, 2));
    if ((tile + 1) * Shape::kKeys > prefix) hide(tile);
  }

  template <int FIRST>
  __device__ __forceinline__ void multiply_slabs(uint32_t parity) {
#pragma unroll
    for (int slab = FIRST; slab < FIRST + 4; ++slab) {
      wait_barrier(memory.filled(W, slab), parity);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        multiply_shared<Operand, Shape::kKeys>(scores, rows_operand(memory.queries(slab)) + (k * 32 >> 4),
                                               rows_operand(memory.keys(W, slab)) + (k * 32 >> 4), 1);
      }
    }
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

  __device__ __forceinline__ void compute_probs(float (&rescale)[2]) {
    const float factor[2] = {p.scale * kLog2E, p.scale * kLog2E};
    state.follow(scores, factor, rescale);
  }

  __device__ __forceinline__ void pack_probs() {
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 4; ++i) probs[i] = pack<Operand>(scores[2 * i], scores[2 * i + 1]);
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

  // Most tiles move no maximum.
  __device__ __forceinline__ void scale_outputs(const float (&factor)[2]) {
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < Shape::kValueDim / 4; ++i) out[i] *= factor[i / 2 % 2];
    }
    pin(out);
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

  // The other's probabilities and tile. Its copies have arrived, for the other has multiplied them.
  __device__ __forceinline__ void multiply_other() {
#pragma unroll
    for (int slab = 4 * W; slab < 4 * W + 4; ++slab) wait_barrier(memory.filled(kOther, slab), key_parity[kOther]);
    key_parity[kOther] ^= 1;
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
