// The consumer warps: 16 output features by 8 rows at a time, up to four tiles by six columns of rows a warp. Masks alone
// make 16-bit operands q + bias of 4-bit values q; biases, zero points and scales are applied to a group's sums in fp32.
//
// mma.sync and not wgmma: a wgmma with its A operand in registers takes the time of 128 rows, even for one
// (docs/measurements).
#pragma once

#include "pipeline/grouped_w4a16_load.cuh"
#include "formats/int4_converter.cuh"

namespace slipstream {

// The eight values q of a word as four pairs (nibbles i and i + 4): q + bias; fp16: odd pairs are 16 q + bias.
template <typename T>
__device__ __forceinline__ void expand_biased(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (__is_same(T, __half)) {
      const uint32_t shifted = i < 2 ? word : word >> 8;
      pairs[i] = masked_or(shifted, i % 2 == 0 ? 0x000F000Fu : 0x00F000F0u, 0x64006400u);
    } else {
      pairs[i] = masked_or(word >> (4 * i), 0x000F000Fu, 0x43004300u);
    }
  }
}

template <typename SHAPE>
struct GroupedW4A16Sums {
  float of[SHAPE::kWarpTiles][SHAPE::kColumns][4];   // rows l / 4 and + 8 of a tile, rows 2 (l % 4) + 0, 1 of a column
};

template <typename SHAPE>
struct GroupedW4A16Consumer {
  using T = typename SHAPE::Operand;
  const GroupedW4A16Memory<SHAPE>& ring;
  int warp, half, lane;   // half: the block of a stage that the warp multiplies
  bool is_channelwise;
  PipelineState<SHAPE::kStages> state;

  // sums = the products of a pass. Missing tiles and columns may be multiplied too; their sums are not written.
  __device__ __forceinline__ void consume(const Pass& pass, int blocks, GroupedW4A16Sums<SHAPE>& sums) {
#pragma unroll
    for (int i = 0; i < SHAPE::kWarpTiles; ++i) {
#pragma unroll
      for (int column = 0; column < SHAPE::kColumns; ++column) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.of[i][column][e] = 0.0f;
      }
    }
    const bool is_short = item_of<SHAPE>(warp, SHAPE::kWarpTiles / 2) >= pass.num_items;
    const int used = (pass.rows.num_rows + 7) / 8;
    is_short ? consume_columns<SHAPE::kWarpTiles / 2>(used, blocks, sums)
             : consume_columns<SHAPE::kWarpTiles>(used, blocks, sums);
  }

 private:
  template <int TILES>
  __device__ __forceinline__ void consume_columns(int used, int blocks, GroupedW4A16Sums<SHAPE>& sums) {
    if (used <= 1) return consume_stages<TILES, 1>(blocks, sums);
    if (SHAPE::kColumns == 2 || used <= 2) return consume_stages<TILES, 2>(blocks, sums);
    if constexpr (SHAPE::kColumns > 2) {
      used <= 4 ? consume_stages<TILES, 4>(blocks, sums) : consume_stages<TILES, SHAPE::kColumns>(blocks, sums);
    }
  }

  template <int TILES, int COLUMNS>
  __device__ __forceinline__ void consume_stages(int blocks, GroupedW4A16Sums<SHAPE>& sums) {
#pragma unroll 1
    for (int block = half; block < blocks + half; block += SHAPE::kBlocks, state.advance()) {
      wait_barrier(ring.full(state.stage), state.parity);
      if (block < blocks) multiply_block<TILES, COLUMNS>(min(2, blocks - block + half), sums);
      __syncwarp();
      if (lane == 0) arrive(ring.empty(state.stage));
    }
  }

  // Scale and zero point of a row's group, packed.  num_blocks: blocks of the stage that have scales of their own.
  __device__ __forceinline__ uint32_t packed_scale(int i, int row, int group, int num_blocks) const {
    const int tile_bytes = num_blocks * 64 * SHAPE::kGroups;
    const uint32_t tile = ring.scales(state.stage) + offset_of<SHAPE>(warp, i, tile_bytes, 2 * 64 * SHAPE::kGroups);
    return load_shared_4(tile + ((row * num_blocks + (num_blocks - 1) * half) * SHAPE::kGroups + group) * 4);
  }

  // num_blocks: of the stage. With many rows, two tiles are multiplied at a time: `parts` needs the registers of `sums`.
  template <int TILES, int COLUMNS>
  __device__ __forceinline__ void multiply_block(int num_blocks, GroupedW4A16Sums<SHAPE>& sums) const {
    constexpr int kTogether = COLUMNS <= 2 ? TILES : 2;
    const int scale_blocks = is_channelwise ? 1 : num_blocks;
#pragma unroll
    for (int first = 0; first < TILES; first += kTogether) {
      uint32_t weights[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int tile = offset_of<SHAPE>(warp, first + i, num_blocks * SHAPE::kBlockBytes, 2 * SHAPE::kBlockBytes);
        weights[i] = ring.weights(state.stage) + tile + half * SHAPE::kBlockBytes + lane * 8;
      }
#pragma unroll
      for (int group = 0; group < SHAPE::kGroups; ++group) {
        float parts[kTogether][COLUMNS][4] = {};
#pragma unroll(COLUMNS > 2 ? 1 : kGroupSteps)   // operands of several steps do not fit beside the sums
        for (int step = group * kGroupSteps; step < (group + 1) * kGroupSteps; ++step) {
          multiply_step<kTogether, COLUMNS>(step, weights, parts);
        }
        add_group<kTogether, COLUMNS>(first, group, scale_blocks, parts, sums);
      }
    }
  }

  static constexpr int kGroupSteps = 4 / SHAPE::kGroups;   // of 32 input features

  template <int TILES, int COLUMNS>
  __device__ __forceinline__ void multiply_step(int step, const uint32_t (&weights)[TILES],
                                                float (&parts)[TILES][COLUMNS][4]) const {
    const uint32_t rows = ring.rows(state.stage) + SHAPE::kSumBytes + half * SHAPE::kColumnBytes + step * 512 + lane * 16;
    uint4 b[COLUMNS];
    uint2 qweight[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) qweight[i] = load_shared_8(weights[i] + step * 256);
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      b[column] = load_shared_16(rows + column * SHAPE::kBlocks * SHAPE::kColumnBytes);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      uint32_t top[4], bottom[4];
      expand_biased<T>(qweight[i].x, top);
      expand_biased<T>(qweight[i].y, bottom);
      const uint32_t first[4] = {top[0], bottom[0], top[1], bottom[1]}, second[4] = {top[2], bottom[2], top[3], bottom[3]};
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) multiply_add<T>(parts[i][column], first, b[column].x, b[column].y);
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) multiply_add<T>(parts[i][column], second, b[column].z, b[column].w);
    }
  }

  // sums += scale * (parts - biased sum of the row - zero point * sum of the row), over one group.
  template <int TILES, int COLUMNS>
  __device__ __forceinline__ void add_group(int first, int group, int scale_blocks, const float (&parts)[TILES][COLUMNS][4],
                                            GroupedW4A16Sums<SHAPE>& sums) const {
    float scale[TILES][2], zero[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const uint32_t word = packed_scale(first + i, lane / 4 + 8 * upper, group, scale_blocks);
        scale[i][upper] = scale_of(word);
        zero[i][upper] = 8388608.0f - __uint_as_float(0x4B000000u | word >> 16);   // minus the zero point, without a conversion
      }
    }
    const uint32_t activation_sums =
        ring.rows(state.stage) + half * (SHAPE::kSumBytes / 2) + (group * SHAPE::kTileRows + lane % 4 * 2) * 8;
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      const uint4 pair = load_shared_16(activation_sums + column * 64);   // of two rows: (biased sum, sum)
      const float biased[2] = {__uint_as_float(pair.x), __uint_as_float(pair.z)};
      const float plain[2] = {__uint_as_float(pair.y), __uint_as_float(pair.w)};
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float exact = parts[i][column][e] - biased[e % 2] + zero[i][e / 2] * plain[e % 2];
          sums.of[first + i][column][e] += scale[i][e / 2] * exact;
        }
      }
    }
  }
};

}  // namespace slipstream
