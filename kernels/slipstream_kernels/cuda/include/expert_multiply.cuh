// The multiplying warps: 16 output features by 8 rows at a time, up to four strips by six columns of rows a warp. Codes
// become 16-bit operands in registers, (code - zero) * scale, rounded once; sums stay in fp32 registers.
//
// mma and not wgmma: a warpgroup product with its operand in registers takes the time of 128 rows however few there are
// (docs/LOG.md).
#pragma once

#include "expert_load.cuh"
#include "int4_codec.cuh"

namespace slipstream {

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// (code - zero) * scale of a row's codes.
template <typename T>
struct ScaledRow {
  Codec<T> codec;
  uint32_t scale;   // twice

  __device__ __forceinline__ explicit ScaledRow(uint32_t word) : codec(word >> 16) {
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
struct ExpertSums {
  float of[SHAPE::kWarpStrips][SHAPE::kColumns][4];   // rows l / 4 and + 8 of a strip, rows 2 (l % 4) + 0, 1 of a column
};

template <typename SHAPE>
struct ExpertConsumer {
  using T = typename SHAPE::Operand;
  const ExpertRing<SHAPE>& ring;
  int warp, half, lane;   // of the four of a block; which block of a stage
  bool is_channelwise;
  RingPlace<SHAPE::kStages> place;

  // sums = the products of a pass. Strips and columns that it lacks may be multiplied too, out of what lies there.
  __device__ __forceinline__ void consume(const Pass& pass, int blocks, ExpertSums<SHAPE>& sums) {
#pragma unroll
    for (int i = 0; i < SHAPE::kWarpStrips; ++i) {
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.of[i][column][e] = 0.0f;
      }
    }
    const bool is_short = unit_of<SHAPE>(warp, SHAPE::kWarpStrips / 2) >= pass.num_units;
    const int used = (pass.rows.num_rows + 7) / 8;
    is_short ? consume_columns<SHAPE::kWarpStrips / 2>(used, blocks, sums)
             : consume_columns<SHAPE::kWarpStrips>(used, blocks, sums);
  }

 private:
  template <int STRIPS>
  __device__ __forceinline__ void consume_columns(int used, int blocks, ExpertSums<SHAPE>& sums) {
    if (used <= 1) return consume_stages<STRIPS, 1>(blocks, sums);
    if (SHAPE::kColumns == 2 || used <= 2) return consume_stages<STRIPS, 2>(blocks, sums);
    if constexpr (SHAPE::kColumns > 2) {
      used <= 4 ? consume_stages<STRIPS, 4>(blocks, sums) : consume_stages<STRIPS, SHAPE::kColumns>(blocks, sums);
    }
  }

  template <int STRIPS, int COLUMNS>
  __device__ __forceinline__ void consume_stages(int blocks, ExpertSums<SHAPE>& sums) {
#pragma unroll 1
    for (int block = half; block < blocks + half; block += SHAPE::kBlocks, place.advance()) {
      wait_barrier(ring.filled(place.stage), place.parity);
      if (block < blocks) multiply_block<STRIPS, COLUMNS>(min(2, blocks - block + half), sums);
      __syncwarp();
      if (lane == 0) arrive(ring.emptied(place.stage));
    }
  }

  // The word of a row's group; num_blocks: that have words in the stage.
  __device__ __forceinline__ uint32_t word_of(int i, int row, int group, int num_blocks) const {
    const int strip_bytes = num_blocks * 64 * SHAPE::kGroups;
    const uint32_t strip = ring.words(place.stage) + place_of<SHAPE>(warp, i, strip_bytes, 2 * 64 * SHAPE::kGroups);
    return load_shared_4(strip + ((row * num_blocks + (num_blocks - 1) * half) * SHAPE::kGroups + group) * 4);
  }

  // num_blocks: of the stage.
  template <int STRIPS, int COLUMNS>
  __device__ __forceinline__ void multiply_block(int num_blocks, ExpertSums<SHAPE>& sums) const {
    constexpr int kGroupSteps = 4 / SHAPE::kGroups;   // of 32 input features
    const int word_blocks = is_channelwise ? 1 : num_blocks;
    uint32_t codes[STRIPS];
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      const int strip = place_of<SHAPE>(warp, i, num_blocks * SHAPE::kBlockBytes, 2 * SHAPE::kBlockBytes);
      codes[i] = ring.codes(place.stage) + strip + half * SHAPE::kBlockBytes + lane * 8;
    }
#pragma unroll
    for (int group = 0; group < SHAPE::kGroups; ++group) {
      uint32_t words[STRIPS][2];
#pragma unroll
      for (int i = 0; i < STRIPS; ++i) {
        words[i][0] = word_of(i, lane / 4, group, word_blocks);
        words[i][1] = word_of(i, lane / 4 + 8, group, word_blocks);
      }
#pragma unroll
      for (int step = group * kGroupSteps; step < (group + 1) * kGroupSteps; ++step) {
        multiply_step<STRIPS, COLUMNS>(step, codes, words, sums);
      }
    }
  }

  template <int STRIPS, int COLUMNS>
  __device__ __forceinline__ void multiply_step(int step, const uint32_t (&codes)[STRIPS], const uint32_t (&words)[STRIPS][2],
                                                ExpertSums<SHAPE>& sums) const {
    const uint32_t rows = ring.rows(place.stage) + half * SHAPE::kColumnBytes + step * 512 + lane * 16;
    uint4 b[COLUMNS];
    uint2 eights[STRIPS];
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      eights[i] = load_shared_8(codes[i] + step * 256);
    }
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) b[column] = load_shared_16(rows + column * SHAPE::kBlocks * SHAPE::kColumnBytes);
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      uint32_t top[4], bottom[4];
      ScaledRow<T>(words[i][0]).expand(eights[i].x, top);
      ScaledRow<T>(words[i][1]).expand(eights[i].y, bottom);
      const uint32_t first[4] = {top[0], bottom[0], top[1], bottom[1]}, second[4] = {top[2], bottom[2], top[3], bottom[3]};
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) multiply_add<T>(sums.of[i][column], first, b[column].x, b[column].y);
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) multiply_add<T>(sums.of[i][column], second, b[column].z, b[column].w);
    }
  }
};

}  // namespace slipstream
