// The multiplying warpgroups. Codes become 16-bit operands in registers, (code - zero) * scale, rounded once; sums stay
// in the tensor cores' fp32 registers.
#pragma once

#include "ptx/hopper_copy.cuh"
#include "mma/hopper_mma.cuh"
#include "formats/int4_codec.cuh"
#include "pipeline/int4_stream_load.cuh"
#include "mma/wgmma_fragments.cuh"

namespace slipstream {

// (code - zero) * scale of a row's codes.
template <typename T>
struct ScaledCodec {
  Codec<T> codec;
  uint32_t scale;   // twice

  __device__ __forceinline__ explicit ScaledCodec(uint32_t word) : codec(word >> 16) {
    const float value = scale_of(word);
    scale = pack<T>(value, value);
  }

  __device__ __forceinline__ void expand(uint32_t word, uint32_t (&pairs)[4]) const {
    codec.expand(word, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (__is_same(T, __half)) {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(pairs[i]), "r"(scale));
      } else {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(pairs[i]), "r"(scale));
      }
    }
  }
};

template <typename SHAPE>
struct Multiplier {
  using T = typename SHAPE::Operand;
  static constexpr int kSteps = 4, kInFlight = 2;   // of 32 input features of a block; steps whose operands are kept
  const Ring<SHAPE>& ring;
  int strip, half, lane;   // of the tile's 8 strips; which block of a stage
  RingPlace<SHAPE::kStages> place;
  static constexpr int kProducts = 2;    // of a step
  uint32_t a[kInFlight][kProducts][4];   // operands: by step, product, register

  // Adds the products of a segment's blocks to sums, which begin at zero.
  __device__ __forceinline__ void consume(int num_blocks, float (&sums)[SHAPE::kSums]) {
    bool adds = false;
#pragma unroll 1
    for (int i = 0; i < num_blocks; i += SHAPE::kBlocks) {
      wait_barrier(ring.full(place.stage), place.parity);
      if (i + half < num_blocks) {
        multiply_block(adds, sums);
        adds = true;
      }
      __syncwarp();
      if (lane == 0) arrive(ring.empty(place.stage));
      place.advance();
    }
    pin(sums);
  }

 private:
  __device__ __forceinline__ uint32_t word_of(int row, int group) const {
    const uint32_t words = ring.words(place.stage) + half * SHAPE::kWordBytes;
    return load_shared_4(words + ((16 * strip + row) * SHAPE::kGroups + group) * 4);
  }

  __device__ __forceinline__ void start_step(int step, bool adds, float (&sums)[SHAPE::kSums]) {
    const uint32_t block = ring.activations(place.stage) + half * SHAPE::kActivationBytes;
    const uint64_t tokens = core_matrices(block, SHAPE::kColumns * 16);
    begin_products();
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const uint64_t b = tokens + ((kProducts * step + product) * SHAPE::kColumns * 32 >> 4);
      multiply_fragment<T, SHAPE::kColumns>(sums, a[step % kInFlight][product], b, adds || product > 0);
    }
    commit_products();
  }

  __device__ __forceinline__ void load_codes(uint2 (&eights)[kSteps]) const {
    const uint32_t codes = ring.codes(place.stage) + (strip * SHAPE::kBlocks + half) * SHAPE::kBlockBytes + lane * 8;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) eights[i] = load_shared_8(codes + i * 256);
  }

  __device__ __forceinline__ void multiply_block(bool adds, float (&sums)[SHAPE::kSums]) {
    uint2 eights[kSteps];
    load_codes(eights);
#pragma unroll
    for (int group = 0; group < SHAPE::kGroups; ++group) {
      const ScaledCodec<T> upper(word_of(lane / 4, group)), lower(word_of(lane / 4 + 8, group));
#pragma unroll
      for (int i = group * kSteps / SHAPE::kGroups; i < (group + 1) * kSteps / SHAPE::kGroups; ++i) {
        if (i >= kInFlight) wait_for_products<kInFlight - 1>();   // the products that read these registers have ended
        asm volatile("" : "+r"(eights[i].x), "+r"(eights[i].y)::"memory");
        uint32_t top[4], bottom[4];
        upper.expand(eights[i].x, top);
        lower.expand(eights[i].y, bottom);
#pragma unroll
        for (int product = 0; product < 2; ++product) {
          a[i % kInFlight][product][0] = top[2 * product], a[i % kInFlight][product][1] = bottom[2 * product];
          a[i % kInFlight][product][2] = top[2 * product + 1], a[i % kInFlight][product][3] = bottom[2 * product + 1];
        }
        start_step(i, adds || i > 0, sums);
      }
    }
    wait_for_products<0>();
  }
};

}  // namespace slipstream
