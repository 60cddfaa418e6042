// The multiplying warps: 16 output features by 8 rows at a time, up to four strips by six columns of rows a warp. Codes
// become 16-bit operands, code + bias, by masks alone; zero points, biases and scales are applied to a group's sums in
// fp32.
//
// mma and not wgmma: a warpgroup product with its operand in registers takes the time of 128 rows however few there are
// (docs/measurements).
#pragma once

#include "pipeline/expert_load.cuh"
#include "formats/int4_codec.cuh"

namespace slipstream {

// The eight codes of a word as four pairs (codes i and i + 4): code + bias, of fp16 odd pairs 16 code + bias.
template <typename T>
__device__ __forceinline__ void expand_biased(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (__is_same(T, __half)) {
      const uint32_t eight = i < 2 ? word : word >> 8;
      pairs[i] = masked_or(eight, i % 2 == 0 ? 0x000F000Fu : 0x00F000F0u, 0x64006400u);
    } else {
      pairs[i] = masked_or(word >> (4 * i), 0x000F000Fu, 0x43004300u);
    }
  }
}

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
      wait_barrier(ring.full(place.stage), place.parity);
      if (block < blocks) multiply_block<STRIPS, COLUMNS>(min(2, blocks - block + half), sums);
      __syncwarp();
      if (lane == 0) arrive(ring.empty(place.stage));
    }
  }

  // The word of a row's group; num_blocks: that have words in the stage.
  __device__ __forceinline__ uint32_t word_of(int i, int row, int group, int num_blocks) const {
    const int strip_bytes = num_blocks * 64 * SHAPE::kGroups;
    const uint32_t strip = ring.words(place.stage) + place_of<SHAPE>(warp, i, strip_bytes, 2 * 64 * SHAPE::kGroups);
    return load_shared_4(strip + ((row * num_blocks + (num_blocks - 1) * half) * SHAPE::kGroups + group) * 4);
  }

  // num_blocks: of the stage. Strips are multiplied two at a time where rows are many: parts are as large as sums.
  template <int STRIPS, int COLUMNS>
  __device__ __forceinline__ void multiply_block(int num_blocks, ExpertSums<SHAPE>& sums) const {
    constexpr int kTogether = COLUMNS <= 2 ? STRIPS : 2;
    const int word_blocks = is_channelwise ? 1 : num_blocks;
#pragma unroll
    for (int first = 0; first < STRIPS; first += kTogether) {
      uint32_t codes[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int strip = place_of<SHAPE>(warp, first + i, num_blocks * SHAPE::kBlockBytes, 2 * SHAPE::kBlockBytes);
        codes[i] = ring.codes(place.stage) + strip + half * SHAPE::kBlockBytes + lane * 8;
      }
#pragma unroll
      for (int group = 0; group < SHAPE::kGroups; ++group) {
        float parts[kTogether][COLUMNS][4] = {};
#pragma unroll(COLUMNS > 2 ? 1 : kGroupSteps)   // operands of several steps do not fit beside the sums
        for (int step = group * kGroupSteps; step < (group + 1) * kGroupSteps; ++step) {
          multiply_step<kTogether, COLUMNS>(step, codes, parts);
        }
        add_group<kTogether, COLUMNS>(first, group, word_blocks, parts, sums);
      }
    }
  }

  static constexpr int kGroupSteps = 4 / SHAPE::kGroups;   // of 32 input features

  template <int STRIPS, int COLUMNS>
  __device__ __forceinline__ void multiply_step(int step, const uint32_t (&codes)[STRIPS],
                                                float (&parts)[STRIPS][COLUMNS][4]) const {
    const uint32_t rows = ring.rows(place.stage) + SHAPE::kSumBytes + half * SHAPE::kColumnBytes + step * 512 + lane * 16;
    uint4 b[COLUMNS];
    uint2 eights[STRIPS];
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) eights[i] = load_shared_8(codes[i] + step * 256);
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      b[column] = load_shared_16(rows + column * SHAPE::kBlocks * SHAPE::kColumnBytes);
    }
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      uint32_t top[4], bottom[4];
      expand_biased<T>(eights[i].x, top);
      expand_biased<T>(eights[i].y, bottom);
      const uint32_t first[4] = {top[0], bottom[0], top[1], bottom[1]}, second[4] = {top[2], bottom[2], top[3], bottom[3]};
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) multiply_add<T>(parts[i][column], first, b[column].x, b[column].y);
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) multiply_add<T>(parts[i][column], second, b[column].z, b[column].w);
    }
  }

  // sums += scale * (parts - bias's share - zero * sum of the row), over one group.
  template <int STRIPS, int COLUMNS>
  __device__ __forceinline__ void add_group(int first, int group, int word_blocks, const float (&parts)[STRIPS][COLUMNS][4],
                                            ExpertSums<SHAPE>& sums) const {
    float scale[STRIPS][2], zero[STRIPS][2];
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint32_t word = word_of(first + i, lane / 4 + 8 * part, group, word_blocks);
        scale[i][part] = scale_of(word);
        zero[i][part] = 8388608.0f - __uint_as_float(0x4B000000u | word >> 16);   // minus the zero point, without a conversion
      }
    }
    const uint32_t totals = ring.rows(place.stage) + half * (SHAPE::kSumBytes / 2) + (group * SHAPE::kTileRows + lane % 4 * 2) * 8;
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      const uint4 pair = load_shared_16(totals + column * 64);   // of two rows: bias's share, sum
      const float share[2] = {__uint_as_float(pair.x), __uint_as_float(pair.z)};
      const float total[2] = {__uint_as_float(pair.y), __uint_as_float(pair.w)};
#pragma unroll
      for (int i = 0; i < STRIPS; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float exact = parts[i][column][e] - share[e % 2] + zero[i][e / 2] * total[e % 2];
          sums.of[first + i][column][e] += scale[i][e / 2] * exact;
        }
      }
    }
  }
};

}  // namespace slipstream
