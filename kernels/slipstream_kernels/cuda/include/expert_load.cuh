// What fills the ring: a kernel before that gathers each tile's rows into the order in which codes come out of a word, as
// 16-bit numbers, and a warp that issues bulk copies.
#pragma once

#include <cuda_fp8.h>

#include "bulk_copy.cuh"
#include "expert_walk.cuh"
#include "hopper_copy.cuh"
#include "warp_mma.cuh"

namespace slipstream {

// 32 input features of a row as 16-bit numbers.
template <typename SHAPE>
struct Features32 {
  uint32_t pairs[16];

  __device__ __forceinline__ explicit Features32(const void* from) {
    constexpr int kVectors = 2 * sizeof(typename SHAPE::Input);
    uint4 raw[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) raw[i] = from == nullptr ? uint4{} : __ldcg(static_cast<const uint4*>(from) + i);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) put(4 * i + j, words[j]);
    }
  }

  // Pairs (4 q + i, 16 + 4 q + i), i = 0..3: the second operand of two products for lanes l % 4 = q.
  __device__ __forceinline__ uint4 operand(int q) const {
    const uint32_t *low = pairs + 2 * q, *high = low + 8;
    return make_uint4(__byte_perm(low[0], high[0], 0x5410), __byte_perm(low[0], high[0], 0x7632),
                      __byte_perm(low[1], high[1], 0x5410), __byte_perm(low[1], high[1], 0x7632));
  }

 private:
  __device__ __forceinline__ void put(int index, uint32_t word) {
    if constexpr (sizeof(typename SHAPE::Input) == 2) {
      pairs[index] = word;
    } else {
      const auto low = static_cast<__nv_fp8x2_storage_t>(word & 0xffff), high = static_cast<__nv_fp8x2_storage_t>(word >> 16);
      const __half2_raw first = __nv_cvt_fp8x2_to_halfraw2(low, __NV_E4M3), second = __nv_cvt_fp8x2_to_halfraw2(high, __NV_E4M3);
      pairs[2 * index] = uint32_t{first.x} | uint32_t{first.y} << 16;
      pairs[2 * index + 1] = uint32_t{second.x} | uint32_t{second.y} << 16;
    }
  }
};

// One CTA a block of 128 input features of a tile; a thread takes 32 features of a row at a time. Of rows that do not
// exist, zeros. [column of 8 rows][block of the pair][32 features][lane][16 bytes]
template <typename SHAPE>
__device__ __forceinline__ void arrange_tile(const ExpertParams& p, const int* tiles_until) {
  const int block = blockIdx.x, tile = blockIdx.y;
  const RowTile rows = tile_at(p, SHAPE::kTileRows, tiles_until, tile);
  const int pairs = (gridDim.x + 1) / 2;
  char* base = static_cast<char*>(p.arranged) + (int64_t{tile} * pairs + block / 2) * SHAPE::kRowBytes +
               block % 2 * SHAPE::kColumnBytes;
  const int used = (rows.num_rows + 7) / 8 * 8;
  for (int item = threadIdx.x; item < used * 4; item += blockDim.x) {
    const int row = item / 4, part = item % 4;
    const bool exists = row < rows.num_rows;
    int source = rows.first_row + row;
    if (exists && p.tokens != nullptr) source = __ldcg(p.tokens + source);
    const auto* from = static_cast<const typename SHAPE::Input*>(p.x) + source * p.x_row_stride + block * 128 + 32 * part;
    const Features32<SHAPE> features(exists ? from : nullptr);
    uint4* to = reinterpret_cast<uint4*>(base + row / 8 * SHAPE::kBlocks * SHAPE::kColumnBytes + part * 512) + row % 8 * 4;
#pragma unroll
    for (int q = 0; q < 4; ++q) to[q] = features.operand(q);
    if (block == 0 && part == 0) {
      p.tile_scale[tile * SHAPE::kTileRows + row] = exists && p.x_scale != nullptr ? __ldcg(p.x_scale + source) : 1.0f;
    }
  }
}

// Shared addresses of the ring's parts.
template <typename SHAPE>
struct ExpertRing {
  uint32_t base;

  __device__ __forceinline__ uint32_t codes(int stage) const { return base + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t words(int stage) const { return codes(stage) + SHAPE::kCodeBytes; }
  __device__ __forceinline__ uint32_t rows(int stage) const { return words(stage) + SHAPE::kWordBytes; }
  __device__ __forceinline__ uint32_t filled(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t emptied(int stage) const { return filled(stage) + 8; }
};

// One copy of the codes and one of the words of each part, and one of the rows: a warp takes some 110 clocks to issue a
// copy, however large, and 22 a stage bounded the kernel. Parts stand kPassUnits strips of full pairs apart.
template <typename SHAPE>
__device__ __forceinline__ void fill_stage(const ExpertParams& p, const ExpertRing<SHAPE>& ring, int stage,
                                           const Pass& pass, int pair, uint64_t policy) {
  const int lane = threadIdx.x % 32, blocks = p.in_features / 128, num_blocks = min(2, blocks - 2 * pair);
  const int part_strips = p.out_features / (16 * SHAPE::kUnit), word_blocks = p.is_channelwise != 0 ? 1 : num_blocks;
  const int code_bytes = pass.num_units * num_blocks * SHAPE::kBlockBytes;
  const int word_bytes = pass.num_units * word_blocks * 64 * SHAPE::kGroups;
  const int row_bytes = (pass.rows.num_rows + 7) / 8 * SHAPE::kBlocks * SHAPE::kColumnBytes;
  const uint32_t filled = ring.filled(stage);
  if (lane == 0) arrive_expecting(filled, SHAPE::kUnit * (code_bytes + word_bytes) + row_bytes);
  const int64_t all_strips = int64_t{p.num_experts} * (p.out_features / 16);
  const int part = lane / 2;
  const int64_t strip = int64_t{pass.rows.expert} * (p.out_features / 16) + part * part_strips + pass.unit;
  if (lane >= 2 * SHAPE::kUnit) {
    if (lane > 2 * SHAPE::kUnit) return;
    const char* rows = static_cast<const char*>(p.arranged) + (int64_t{pass.tile} * ((blocks + 1) / 2) + pair) * SHAPE::kRowBytes;
    copy_bulk(ring.rows(stage), rows, row_bytes, filled, keep_policy());
  } else if (lane % 2 == 0) {
    const int64_t from = all_strips * pair * 2 + strip * num_blocks;
    copy_bulk(ring.codes(stage) + part * SHAPE::kPassUnits * SHAPE::kBlocks * SHAPE::kBlockBytes,
              reinterpret_cast<const char*>(p.codes) + from * SHAPE::kBlockBytes, code_bytes, filled, policy);
  } else {
    const int64_t from = (p.is_channelwise != 0 ? 0 : all_strips * pair * 2) + strip * word_blocks;
    copy_bulk(ring.words(stage) + part * SHAPE::kPassUnits * SHAPE::kBlocks * 64 * SHAPE::kGroups,
              reinterpret_cast<const char*>(p.words) + from * 64 * SHAPE::kGroups, word_bytes, filled, policy);
  }
}

template <typename SHAPE>
__device__ __forceinline__ void fill_stages(const ExpertParams& p, const ExpertRing<SHAPE>& ring, const int* tiles_until) {
  const uint64_t policy = evict_first_policy();
  RingPlace<SHAPE::kStages> place;
  for (PassWalk<SHAPE> walk(p, tiles_until); !walk.is_done();) {
    const Pass pass = walk.take();
#pragma unroll 1
    for (int pair = 0; 2 * pair < p.in_features / 128; ++pair, place.advance()) {
      wait_barrier(ring.emptied(place.stage), place.parity ^ 1);
      fill_stage<SHAPE>(p, ring, place.stage, pass, pair, policy);
    }
  }
}

}  // namespace slipstream
