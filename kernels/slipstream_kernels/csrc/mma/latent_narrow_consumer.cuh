// The two warpgroups of latent attention with few rows (16, 24 or 32) that multiply. Keys are the tall side of the products:
// scores^T[64 keys x rows] = keys queries^T, out^T[64 columns x rows] += values^T probabilities^T. With queries as the
// tall side, as latent_consumer.cuh has them, three of four rows would be padding, and shared memory, which gives a
// slab to the tensor cores as fast as one of 64 rows of queries, would be read twice as long.
//
// Each takes every second tile of a unit, from a ring of its own, into sums of its own: they meet at the end of a unit.
// While one computes a softmax the tensor cores work for the other.
#pragma once

#include "epilogue/latent_narrow_store.cuh"
#include "mma/draft_mask.cuh"
#include "mma/wgmma_few_columns.cuh"
#include "schedule/latent_narrow_shape.cuh"

namespace slipstream {

// Named barriers: of all who multiply, the last two of a warpgroup each.
constexpr int kUnitEnds = 1, kFirstGave = 2, kSecondGave = 3, kMaximaLeft = 4, kProbsLeft = 6;

template <int W>
struct NarrowConsumer {
  using Shape = LatentShape;
  using Operand = __nv_bfloat16;
  using Ring = PipelineState<NarrowMemory::kRing>;
  static constexpr int kRows = Shape::kRows;
  static constexpr int kOther = 1 - W;
  static constexpr int kHalf = Shape::kValueSlabs / 2;
  static constexpr int kGroups = NarrowMemory::kFoldsScales ? Shape::kScales : 1;   // of columns with scales of their own
  // With folded scales latents are times 2^-120, and so would be what comes of them.
  static constexpr float kProbFactor = 0x1p64f;
  static constexpr int kMine = kRows / 4;   // rows of a thread: 8 (h / 2) + 2 (lane % 4) + h % 2 is its row h

  const LatentParams& p;
  NarrowMemory memory;
  uint32_t query_parity = 0;
  Ring ring;
  int end, prefix;           // of the unit's tiles; of the keys that all rows see
  float maximum[kMine];      // of all warps' scores, before the factor
  float normaliser[kMine];   // this thread's part
  float out[Shape::kValueSlabs][kRows / 2];
  float scores[kRows / 2];
  float scales[2][Shape::kScales];   // folded ones, of the thread's two keys

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (receive()) {
      int tile = work().begin + W;
      if (NarrowMemory::kLoadsQueriesEarly && tile >= end) release(memory.query_emptied());
#pragma unroll 1
      for (; tile < end; tile += 2) attend(tile);
      finish();
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
  static __device__ __forceinline__ int row_of(int h) { return 8 * (h / 2) + lane() % 4 * 2 + h % 2; }
  // Of accumulator i: the thread's row h.
  static constexpr __device__ int mine(int i) { return i / 4 * 2 + i % 2; }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane() == 0) arrive(barrier);
  }
  __device__ __forceinline__ const LatentWork& work() const { return memory.work(query_parity); }

  // False if nothing is left.
  __device__ __forceinline__ bool receive() {
    wait_barrier(memory.query_filled(), query_parity);
    if (work().request < 0) return false;
    end = work().end, prefix = work().prefix();
#pragma unroll
    for (int h = 0; h < kMine; ++h) maximum[h] = kNothing, normaliser[h] = 0.0f;
#pragma unroll
    for (auto& slab : out) {
#pragma unroll
      for (float& value : slab) value = 0.0f;
    }
    return true;
  }

  __device__ __forceinline__ void attend(int tile) {
    const int rotated = ring.stage;
    if constexpr (NarrowMemory::kFoldsScales) {
      multiply_scaled_scores();
    } else {
      multiply_scores();
      release(memory.emptied(W, rotated));
    }
    if (NarrowMemory::kLoadsQueriesEarly && tile + 2 >= end) release(memory.query_emptied());
    const int first = rotated + 1 == NarrowMemory::kRing ? 0 : rotated + 1;
    if ((tile + 1) * Shape::kKeys > prefix) hide(tile, first);
    leave_probs();
    multiply_values_of(first);
    if (NarrowMemory::kFoldsScales) release(memory.emptied(W, rotated));
  }

  static __device__ __forceinline__ int stage_of(int first, int slab) {
    const int stage = first + slab;
    return stage >= NarrowMemory::kRing ? stage - NarrowMemory::kRing : stage;
  }

  __device__ __forceinline__ void multiply_scores() {
    pin(scores);
#pragma unroll
    for (int step = 0; step < Shape::kSlabs; ++step) {
      const int slab = (step + Shape::kSlabs - 1) % Shape::kSlabs;
      wait_barrier(memory.filled(W, ring.stage), ring.parity);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        multiply_rows<kRows>(scores, rows_operand(memory.slab(W, ring.stage)) + (k * 32 >> 4),
                             rows_operand(memory.queries(slab)) + (k * 32 >> 4), step + k > 0);
      }
      ring.advance();
    }
    commit_products();
    wait_for_products<0>();
    pin(scores);
  }

  // The same where they take the scales: latents are times 2^-120, and each group of 128 columns is summed by itself.
  __device__ __forceinline__ void multiply_scaled_scores() {
    float parts[2][kRows / 2];
    pin(scores);
    wait_barrier(memory.filled(W, 0), ring.parity);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 words = load_shared_16(memory.scales(W) + (warp() * 16 + lane() / 4 + 8 * r) * 16);
      scales[r][0] = __uint_as_float(words.x), scales[r][1] = __uint_as_float(words.y);
      scales[r][2] = __uint_as_float(words.z), scales[r][3] = __uint_as_float(words.w);
    }
    begin_products();
    multiply_slab_of_keys(scores, 0, Shape::kSlabs - 1, 0);
    commit_products();
#pragma unroll
    for (int group = 0; group < Shape::kScales; ++group) {
      pin(parts[group % 2]);
#pragma unroll
      for (int slab = 2 * group; slab < 2 * group + 2; ++slab) {
        wait_barrier(memory.filled(W, slab + 1), ring.parity);
        begin_products();
        multiply_slab_of_keys(parts[group % 2], slab + 1, slab, slab % 2);
      }
      commit_products();
      wait_for_products<1>();
      if (group == 0) pin(scores);
      else add_part(parts[(group - 1) % 2], group - 1);
    }
    wait_for_products<0>();
    add_part(parts[(Shape::kScales - 1) % 2], Shape::kScales - 1);
    ring.parity ^= 1;
  }

  __device__ __forceinline__ void multiply_slab_of_keys(float (&sums)[kRows / 2], int stage, int slab, int adds) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply_rows<kRows>(sums, rows_operand(memory.slab(W, stage)) + (k * 32 >> 4),
                           rows_operand(memory.queries(slab)) + (k * 32 >> 4), adds + k > 0);
    }
  }

  __device__ __forceinline__ void add_part(float (&part)[kRows / 2], int group) {
    pin(part);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) scores[i] = __fmaf_rn(part[i] * 0x1p120f, scales[i / 2 % 2][group], scores[i]);
  }

  __device__ __forceinline__ void hide(int tile, int first) {
    const LatentWork work = this->work();
    const int64_t* tree_mask = p.tree_mask == nullptr ? nullptr : p.tree_mask + work.start;
    const int slot = tile * Shape::kKeys - prefix + warp() * 16 + lane() / 4;
#pragma unroll
    for (int h = 0; h < kMine; ++h) {
      const DraftWord word(tree_mask, (work.first_row + row_of(h)) / p.num_heads, work.query_len);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!word.sees(slot + 8 * r)) scores[h / 2 * 4 + 2 * r + h % 2] = kNothing;
      }
    }
    const int num_keys = work.seq_len - tile * Shape::kKeys;
    if (num_keys < Shape::kKeys) clear_tail(max(num_keys, 0), first);
    if constexpr (NarrowMemory::kFoldsScales) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (warp() * 16 + lane() / 4 + 8 * r < num_keys) continue;
#pragma unroll
        for (float& scale : scales[r]) scale = 0.0f;
      }
    }
  }

  // Slots that the sequence has not reached may hold NaN, which a probability of 0 would not stop. The barrier before the
  // next products is that of the probabilities.
  __device__ __forceinline__ void clear_tail(int num_keys, int first) const {
    char* slabs = memory.base + (memory.slab(W, 0) - memory.address);
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < (Shape::kKeys - num_keys) * 8 * Shape::kValueSlabs; i += 128) {
      const int row = num_keys + i / 8 / Shape::kValueSlabs, stage = stage_of(first, i / 8 % Shape::kValueSlabs);
      *reinterpret_cast<uint4*>(slabs + stage * Shape::kSlabBytes + row * kSwizzleBytes + i % 8 * 16) = uint4{};
    }
  }

  // Scores to probabilities, in shared memory as [rows][64 keys]; brings sums so far to the new maxima.
  __device__ __forceinline__ void leave_probs() {
    float rescale[kMine];
    follow_maxima(rescale);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t probs = memory.probs(W, group) + lane() / 4 * 2;
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        const int row = row_of(mine(i)), part = (2 * warp() + i / 2 % 2) ^ row % 8;
        const float factor = NarrowMemory::kFoldsScales ? scales[i / 2 % 2][group] * kProbFactor : 1.0f;
        store_shared_2(probs + row * kSwizzleBytes + part * 16, pack<Operand>(scores[i] * factor, 0.0f));
      }
    }
    fence_shared_for_engines();
    bool is_moved = false;
#pragma unroll
    for (int h = 0; h < kMine; ++h) is_moved |= rescale[h] != 1.0f;
    // Most tiles move no maximum.
    if (__any_sync(~0u, is_moved)) scale_outputs(rescale);
    sync_threads(kProbsLeft + W, 128);
  }

  // Turns scores into probabilities; rescale: what sums so far are to be multiplied by. All warps have the same maxima.
  __device__ __forceinline__ void follow_maxima(float (&rescale)[kMine]) {
#pragma unroll
    for (int h = 0; h < kMine; ++h) {
      const int i = h / 2 * 4 + h % 2;
      float highest = fmaxf(scores[i], scores[i + 2]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
      if (lane() < 4) store_shared_4(memory.maxima(W, row_of(h)) + warp() * 4, highest);
    }
    sync_threads(kMaximaLeft + W, 128);
    const float factor = p.scale * kLog2E;
#pragma unroll
    for (int h = 0; h < kMine; ++h) {
      const uint4 of_warps = load_shared_16(memory.maxima(W, row_of(h)));
      const float old = maximum[h];
      maximum[h] = fmaxf(fmaxf(fmaxf(old, __uint_as_float(of_warps.x)), __uint_as_float(of_warps.y)),
                         fmaxf(__uint_as_float(of_warps.z), __uint_as_float(of_warps.w)));
      // A row that has seen no key yet: -inf - -inf would be NaN.
      const float shift = maximum[h] == kNothing ? 0.0f : maximum[h] * factor;
      rescale[h] = exp2_fast(old * factor - shift);
      normaliser[h] *= rescale[h];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& score = scores[h / 2 * 4 + 2 * r + h % 2];
        score = exp2_fast(__fmaf_rn(score, factor, -shift));
        normaliser[h] += score;
      }
    }
  }

  __device__ __forceinline__ void scale_outputs(const float (&factor)[kMine]) {
#pragma unroll
    for (auto& slab : out) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) slab[i] *= factor[mine(i)];
    }
  }

  __device__ __forceinline__ void multiply_values_of(int first) {
#pragma unroll
    for (auto& slab : out) pin(slab);
    begin_products();
#pragma unroll
    for (int slab = 0; slab < Shape::kValueSlabs; ++slab) {
      const uint64_t values = columns_operand(memory.slab(W, stage_of(first, slab)), Shape::kSlabBytes);
      const uint64_t probs = rows_operand(memory.probs(W, slab * kGroups / Shape::kValueSlabs));
#pragma unroll
      for (int k = 0; k < Shape::kKeys / 16; ++k) {
        multiply_columns<kRows>(out[slab], values + (k * 16 * kSwizzleBytes >> 4), probs + (k * 32 >> 4));
      }
      if (slab % kHalf == kHalf - 1) commit_products();
    }
    wait_for_products<1>();
#pragma unroll
    for (int slab = 0; slab < kHalf; ++slab) release(memory.emptied(W, stage_of(first, slab)));
    wait_for_products<0>();
#pragma unroll
    for (auto& slab : out) pin(slab);
#pragma unroll
    for (int slab = kHalf; slab < Shape::kValueSlabs; ++slab) release(memory.emptied(W, stage_of(first, slab)));
  }

  // Adds up what both have: warpgroup w ends with columns 256 w to 256 w + 255, and stores them.
  __device__ __forceinline__ void finish() {
    float highest[kMine], sums[kMine];
    meet(highest, sums);
    // Of the second first: the first has read it where it puts its own.
#pragma unroll
    for (int slab = 0; slab < kHalf; slab += NarrowMemory::kGivenSlabs) {
      if constexpr (W == 1) {
        give(out + slab);
        arrive_threads(kSecondGave, 256);
        sync_threads(kFirstGave, 256);
        take(out + kHalf + slab);
      } else {
        sync_threads(kSecondGave, 256);
        take(out + slab);
        give(out + kHalf + slab);
        arrive_threads(kFirstGave, 256);
      }
    }
    NarrowStore<W>{p, work()}.run(out + W * kHalf, highest, sums, memory.flag());
    if (!NarrowMemory::kLoadsQueriesEarly) {
      fence_shared_for_engines();   // the next queries come where the sums were
      __syncwarp();
      release(memory.query_emptied());
    }
    query_parity ^= 1;
  }

  // The rows' maxima and normalisers of both; brings outputs to these maxima. Then nobody reads the queries any more.
  __device__ __forceinline__ void meet(float (&highest)[kMine], float (&sums)[kMine]) {
#pragma unroll
    for (int h = 0; h < kMine; ++h) {
      float sum = normaliser[h];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      if (lane() < 4) {
        store_shared_4(memory.sums(W, row_of(h)) + warp() * 4, sum);
        if (warp() == 0) store_shared_4(memory.maxima(W, row_of(h)), maximum[h]);
      }
    }
    sync_threads(kUnitEnds, 256);
    const float factor = p.scale * kLog2E;
    float rescale[kMine];
#pragma unroll
    for (int h = 0; h < kMine; ++h) {
      const int row = row_of(h);
      const float others = __uint_as_float(load_shared_4(memory.maxima(kOther, row)));
      highest[h] = fmaxf(maximum[h], others);
      const float shift = highest[h] == kNothing ? 0.0f : highest[h] * factor;
      rescale[h] = exp2_fast(maximum[h] * factor - shift);
      const float of_other = exp2_fast(others * factor - shift);
      sums[h] = W == 0 ? sum_of(0, row) * rescale[h] + sum_of(1, row) * of_other
                       : sum_of(0, row) * of_other + sum_of(1, row) * rescale[h];
      highest[h] = highest[h] == kNothing ? kNothing : shift;
    }
    if (NarrowMemory::kFoldsScales) {
#pragma unroll
      for (float& value : rescale) value *= 0x1p120f / kProbFactor;
    }
    scale_outputs(rescale);
  }

  __device__ __forceinline__ float sum_of(int w, int row) const {
    const uint4 of_warps = load_shared_16(memory.sums(w, row));
    return (__uint_as_float(of_warps.x) + __uint_as_float(of_warps.y)) +
           (__uint_as_float(of_warps.z) + __uint_as_float(of_warps.w));
  }

  // Some slabs of the outputs, thread by thread: those of both warpgroups hold the same ones.
  __device__ __forceinline__ uint32_t given(int slab, int i) const {
    return memory.given() + ((slab * kRows / 2 + i) * 128 + threadIdx.x % 128 * 4) * 4;
  }
  __device__ __forceinline__ void give(const float (*slabs)[kRows / 2]) const {
#pragma unroll
    for (int slab = 0; slab < NarrowMemory::kGivenSlabs; ++slab) {
#pragma unroll
      for (int i = 0; i < kRows / 2; i += 4) {
        store_shared_16(given(slab, i), slabs[slab][i], slabs[slab][i + 1], slabs[slab][i + 2], slabs[slab][i + 3]);
      }
    }
  }
  __device__ __forceinline__ void take(float (*slabs)[kRows / 2]) const {
#pragma unroll
    for (int slab = 0; slab < NarrowMemory::kGivenSlabs; ++slab) {
#pragma unroll
      for (int i = 0; i < kRows / 2; i += 4) {
        const uint4 words = load_shared_16(given(slab, i));
        slabs[slab][i] += __uint_as_float(words.x), slabs[slab][i + 1] += __uint_as_float(words.y);
        slabs[slab][i + 2] += __uint_as_float(words.z), slabs[slab][i + 3] += __uint_as_float(words.w);
      }
    }
  }
};

}  // namespace slipstream
