// The multiplying warpgroups. Each expands the codes of its 64 output features to e4m3 in shared memory, a block while
// the one before is multiplied: a nibble in the low bits of e4m3 is code / 512, exactly. A group's products are summed
// by the tensor cores; zero point, times the sum of activations (w4a8_stream_totals.cuh), and scale are applied in
// fp32.
//
// What it takes to expand bounds the time (docs/LOG.md): tables of (code - zero) cost twice as many instructions.
#pragma once

#include "hopper_mma.cuh"
#include "int4_codec.cuh"
#include "w4a8_stream_shape.cuh"
#include "wgmma_shared.cuh"

namespace slipstream {

template <typename SHAPE>
struct W4a8Multiplier {
  static constexpr int kSteps = 4, kGroupSteps = kSteps / SHAPE::kGroups;   // of 32 input features
  W4a8Memory<SHAPE> memory;
  const W4a8Share& share;
  int warpgroup;
  RingPlace<SHAPE::kStages> place;
  int strip = threadIdx.x / 32, lane = threadIdx.x % 32;

  // is_idle: this warpgroup has no strip in the pass.
  __device__ __forceinline__ void multiply_pass(bool is_idle, float (&sums)[SHAPE::kSums]) {
    const int blocks = share.end_block - share.begin_block;
    await();
    if (is_idle) return skip_pass(blocks);
    sync();   // the pass before has been multiplied
    expand(place.stage, 0);
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      const int stage = place.stage, block = i % 2;
      const bool has_next = i + 1 < blocks;
      sync();   // the block is expanded, and the one before it multiplied
      multiply_block(stage, block, sums, [&] {
        if (!has_next) return;
        if (block == 1) place.advance(), await();
        expand(place.stage, 1 - block);
      });
      if (block == 1 || !has_next) release(stage);
    }
    place.advance();
  }

 private:
  __device__ __forceinline__ void await() const { wait_barrier(memory.filled(place.stage), place.parity); }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (lane == 0) arrive(memory.emptied(stage));
  }

  // Of the warpgroup's threads, and their writes before its products.
  __device__ __forceinline__ void sync() const {
    fence_shared_for_engines();
    sync_threads(2 + warpgroup, 128);
  }

  __device__ __forceinline__ void skip_pass(int blocks) {
    for (int block = 0; block < blocks; block += 2) {
      await();
      release(place.stage);
      place.advance();
    }
  }

  __device__ __forceinline__ uint32_t word_of(int stage, int block, int half, int group) const {
    const int row = 16 * strip + lane / 4 + 8 * half;
    return load_shared_4(memory.words(stage) + block * SHAPE::kWordBytes + (row * SHAPE::kGroups + group) * 4);
  }

  // The warp's strip of a block of the stage: 16 bytes c of row r of a tile lie at c ^ r % 8.
  __device__ __forceinline__ void expand(int stage, int block) const {
    const uint32_t codes = memory.codes(stage) + strip * SHAPE::kStripBytes + block * SHAPE::kBlockBytes + lane * 8;
    const int row = lane / 4;
    const uint32_t to = memory.tile(warpgroup, block) + (strip % 4 * 16 + row) * 128 + lane % 4 * 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint2 eight = load_shared_8(codes + step * 256);
      const uint32_t low = to + ((2 * step ^ row) << 4), high = to + ((2 * step + 1 ^ row) << 4);
      store_codes(eight.x, low, high);
      store_codes(eight.y, low + 8 * 128, high + 8 * 128);
    }
  }

  // Nibbles 0..3 of a word are neighbours, nibbles 4..7 those 16 features further.
  static __device__ __forceinline__ void store_codes(uint32_t word, uint32_t low, uint32_t high) {
    const uint32_t even = word & 0x0F0F0F0Fu, odd = word >> 4 & 0x0F0F0F0Fu;
    store_shared_4(low, __byte_perm(even, odd, 0x5140));
    store_shared_4(high, __byte_perm(even, odd, 0x7362));
  }

  // sums += the block's products; meanwhile() is done while they are under way.
  template <typename MEANWHILE>
  __device__ __forceinline__ void multiply_block(int stage, int block, float (&sums)[SHAPE::kSums],
                                                 const MEANWHILE& meanwhile) {
    const uint64_t weights = rows_operand(memory.tile(warpgroup, block));
    const uint64_t tokens = rows_operand(memory.tokens(stage) + block * SHAPE::kTokenBytes);
#pragma unroll
    for (int group = 0; group < SHAPE::kGroups; ++group) {
      float parts[SHAPE::kSums];
      begin_products();
#pragma unroll
      for (int i = 0; i < kGroupSteps; ++i) {
        const int step = 2 * (group * kGroupSteps + i);   // 32 bytes, as descriptors count
        multiply_shared<__nv_fp8_e4m3, SHAPE::kColumns>(parts, weights + step, tokens + step, i > 0);
      }
      commit_products();
      const uint32_t words[2] = {word_of(stage, block, 0, group), word_of(stage, block, 1, group)};
      if (group == 0) {
        if (block == 0) wait_barrier(memory.summed(stage), place.parity);
        meanwhile();
      }
      wait_for_products<0>();
      pin(parts);
      add(words, memory.totals(stage, block, group), parts, sums);
    }
  }

  // sums += scale * (512 parts - zero * totals), for rows l / 4 and l / 4 + 8.
  __device__ __forceinline__ void add(const uint32_t (&words)[2], uint32_t totals, const float (&parts)[SHAPE::kSums],
                                      float (&sums)[SHAPE::kSums]) const {
    float scale[2], zero[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = 512.0f * scale_of(words[half]), zero[half] = -static_cast<float>(words[half] >> 16) / 512.0f;
    }
#pragma unroll
    for (int i = 0; i < SHAPE::kColumns / 8; ++i) {
      const uint2 pair = load_shared_8(totals + 32 * i + lane % 4 * 8);
      const float total[2] = {__uint_as_float(pair.x), __uint_as_float(pair.y)};
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[4 * i + e] += scale[e / 2] * (parts[4 * i + e] + zero[e / 2] * total[e % 2]);
    }
  }
};

}  // namespace slipstream
