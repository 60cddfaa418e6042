// What the grouped GEMM on warpgroup products needs to know of its weights: how a stage of 128 output features is copied, where
// a lane finds its codes and scales there, how it expands them, and the order of input features that this gives.
//
// A unit of 64 input features has two words of eight codes for each row of a lane (rows l / 4 and + 8 of a warp's 16 output
// features); a word has four pairs, and two products: their columns 2 t + e and 8 + 2 t + e are pairs of lane t of a row's four.
#pragma once

#include "formats/int4_converter.cuh"
#include "formats/mxfp4_words.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/hopper_copy.cuh"
#include "schedule/grouped_mxfp4_shape.cuh"

namespace slipstream {

// Where a stage's weights come from and go to.
struct WideStage {
  int expert, first_feature, first_unit, units;
  uint32_t to, barrier;
};

// MXFP4 in the order of grouped_mxfp4_layout.py: in blocks of 32 output features, units follow each other.
struct WideMxfp4 {
  using Operand = __nv_bfloat16;
  using Unit = GroupedMxfp4Unit;
  static constexpr int kBlocks = 128 / Unit::kFeatures;

  template <int UNITS>
  static constexpr int stage_bytes() { return kBlocks * UNITS * Unit::kBytes; }

  static __device__ __forceinline__ int count_blocks(const GroupedGemmParams& p, const WideStage& stage) {
    return min(kBlocks, (p.out_features - stage.first_feature) / Unit::kFeatures);
  }

  static __device__ __forceinline__ int copied_bytes(const GroupedGemmParams& p, const WideStage& stage) {
    return count_blocks(p, stage) * stage.units * Unit::kBytes;
  }

  template <int UNITS>
  static __device__ __forceinline__ void copy(const GroupedGemmParams& p, const WideStage& stage, uint64_t policy) {
    const int units = Unit::count(p.in_features);
    const int64_t block = (static_cast<int64_t>(stage.expert) * p.out_features + stage.first_feature) / Unit::kFeatures;
    const char* from = reinterpret_cast<const char*>(p.qweight) + (block * units + stage.first_unit) * Unit::kBytes;
    for (int i = 0; i < count_blocks(p, stage); ++i) {
      copy_bulk(stage.to + i * UNITS * Unit::kBytes, from + static_cast<int64_t>(i) * units * Unit::kBytes,
                stage.units * Unit::kBytes, stage.barrier, policy);
    }
  }

  // A lane's codes and scales of a unit.
  struct Weights {
    uint32_t codes[4], scales[1];

    template <int UNITS>
    __device__ __forceinline__ void load(const GroupedGemmParams&, uint32_t stage, int unit, int) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      const uint32_t from = stage + (warp / 2 * UNITS + unit) * Unit::kBytes;
      const uint4 raw = load_shared_16(from + 512 * (warp % 2) + 16 * lane);
      codes[0] = raw.x, codes[1] = raw.y, codes[2] = raw.z, codes[3] = raw.w;
      scales[0] = load_shared_4(from + Unit::kScaleOffset + 4 * (lane / 2));
    }

    __device__ __forceinline__ void pin() { slipstream::pin(codes), slipstream::pin(scales); }

    __device__ __forceinline__ void expand(int word, int row, uint32_t (&pairs)[4]) const {
      const int tile = threadIdx.x / 32 % 2;
      expand_e2m1(codes[2 * row + word], mxfp4_factor(scales[0], 2 * tile + row), pairs);
    }
  };

  // Of part 0 to 3 of a word's 32 input features in x, eight together: the first.
  static __device__ __forceinline__ int first_input(int word, int part) { return 16 * part + 8 * word; }
  // Pair i of the four lanes, of these parts.
  static __device__ __forceinline__ uint4 pairs_of_lanes(const uint32_t (&parts)[4][4], int i) {
    return make_uint4(parts[0][i], parts[1][i], parts[2][i], parts[3][i]);
  }

  // By which sums of an output feature are multiplied.
  static __device__ __forceinline__ float factor(const GroupedGemmParams&, int, int) { return kMxfp4Unit; }
};

// Integers in the order of int4_layout.py: pairs of blocks of 128 input features, in each tiles of 16 output features. A
// scale with its zero point is of GROUPS groups of a block, or of a whole row; channel scales come last.
template <typename T, int GROUPS>
struct WideInt4 {
  using Operand = T;
  static constexpr int kTiles = 8, kTileBytes = 2048, kBlockBytes = 1024;   // of a stage: a pair of blocks
  static constexpr int kScaleBytes = 64 * GROUPS;                            // of a block of a tile

  template <int UNITS>
  static constexpr int stage_bytes() {
    static_assert(UNITS == 4);
    return kTiles * (kTileBytes + 2 * kScaleBytes);
  }

  static __device__ __forceinline__ int count_tiles(const GroupedGemmParams& p, const WideStage& stage) {
    return min(kTiles, (p.out_features - stage.first_feature) / 16);
  }
  static __device__ __forceinline__ int scale_blocks(const GroupedGemmParams& p, int units) {
    return p.is_channelwise != 0 ? 1 : units / 2;
  }

  static __device__ __forceinline__ int copied_bytes(const GroupedGemmParams& p, const WideStage& stage) {
    return count_tiles(p, stage) * (stage.units / 2 * kBlockBytes + scale_blocks(p, stage.units) * kScaleBytes);
  }

  template <int UNITS>
  static __device__ __forceinline__ void copy(const GroupedGemmParams& p, const WideStage& stage, uint64_t policy) {
    const int blocks = stage.units / 2, tiles = count_tiles(p, stage), scales = scale_blocks(p, stage.units);
    const int64_t before = int64_t{p.num_experts} * (p.out_features / 16) * (stage.first_unit / 2);   // of all tiles
    const int64_t tile = (int64_t{stage.expert} * p.out_features + stage.first_feature) / 16;
    copy_bulk(stage.to, reinterpret_cast<const char*>(p.qweight) + (before + tile * blocks) * kBlockBytes,
              tiles * blocks * kBlockBytes, stage.barrier, policy);
    const int64_t from = (p.is_channelwise != 0 ? 0 : before) + tile * scales;
    copy_bulk(stage.to + kTiles * kTileBytes, reinterpret_cast<const char*>(p.group_scales) + from * kScaleBytes,
              tiles * scales * kScaleBytes, stage.barrier, policy);
  }

  struct Weights {
    uint32_t codes[4], scales[2];

    // units: of the stage.
    template <int UNITS>
    __device__ __forceinline__ void load(const GroupedGemmParams& p, uint32_t stage, int unit, int units) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = units / 2;
      const uint32_t from = stage + (warp * blocks + unit / 2) * kBlockBytes + unit % 2 * 512 + 8 * lane;
      const uint2 first = load_shared_8(from), second = load_shared_8(from + 256);
      codes[0] = first.x, codes[1] = second.x, codes[2] = first.y, codes[3] = second.y;
      const int of_block = scale_blocks(p, units), group = GROUPS == 2 ? unit % 2 : 0;
      const int block = of_block == 2 ? unit / 2 : 0;
      const uint32_t of_tile = stage + kTiles * kTileBytes + warp * of_block * kScaleBytes;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        scales[row] = load_shared_4(of_tile + (((lane / 4 + 8 * row) * of_block + block) * GROUPS + group) * 4);
      }
    }

    __device__ __forceinline__ void pin() { slipstream::pin(codes), slipstream::pin(scales); }

    __device__ __forceinline__ void expand(int word, int row, uint32_t (&pairs)[4]) const {
      ScaledInt4Converter<T>(scales[row]).expand(codes[2 * row + word], pairs);
    }
  };

  static __device__ __forceinline__ int first_input(int word, int part) { return 32 * word + 8 * part; }
  // Lane q has input features 4 q to 4 q + 3, and those 16 further: the two halves of a pair.
  static __device__ __forceinline__ uint4 pairs_of_lanes(const uint32_t (&parts)[4][4], int i) {
    const uint32_t halves = i % 2 == 0 ? 0x5410 : 0x7632;
    uint32_t lanes[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int of_part = q % 2 * 2 + i / 2;
      lanes[q] = __byte_perm(parts[q / 2][of_part], parts[2 + q / 2][of_part], halves);
    }
    return make_uint4(lanes[0], lanes[1], lanes[2], lanes[3]);
  }

  static __device__ __forceinline__ float factor(const GroupedGemmParams& p, int expert, int feature) {
    return feature < p.out_features ? __ldg(p.channel_scale + static_cast<int64_t>(expert) * p.out_features + feature) : 0.0f;
  }
};

}  // namespace slipstream
