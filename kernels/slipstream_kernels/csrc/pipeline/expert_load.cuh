// The producers: a kernel before gathers each tile's rows as 16-bit numbers, in the order in which codes come out of a
// word; a warp of the product issues bulk copies.
#pragma once

#include <cuda_fp8.h>

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/expert_walk.cuh"
#include "ptx/hopper_copy.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

// A code in the low bits of fp16 1024 makes 1024 + code, four bits higher 1024 + 16 code; of bf16 128 (7 bits of
// fraction) it makes 128 + code, in the low bits only. So operands need no arithmetic: what is too much is a multiple
// of sums of rows.
template <typename T>
struct CodeBias;
template <>
struct CodeBias<__half> {
  static constexpr float kLow = 1024.0f, kHigh = 64.0f;   // of rows' features, where those of high codes are divided by 16
};
template <>
struct CodeBias<__nv_bfloat16> {
  static constexpr float kLow = 128.0f, kHigh = 128.0f;
};

// 32 input features of a row as 16-bit numbers.
template <typename SHAPE>
struct Features32 {
  using T = typename SHAPE::Operand;
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

  // (what the bias of codes adds, the sum).
  __device__ __forceinline__ float2 sums() const {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      even += to_float(reinterpret_cast<const T*>(pairs)[2 * i]), odd += to_float(reinterpret_cast<const T*>(pairs)[2 * i + 1]);
    }
    return make_float2(CodeBias<T>::kLow * even + CodeBias<T>::kHigh * odd, even + odd);
  }

  // Pairs (4 q + i, 16 + 4 q + i), i = 0..3: the second operand of two products for lanes l % 4 = q. Odd features meet
  // codes that stand four bits higher.
  __device__ __forceinline__ uint4 operand(int q) const {
    const uint32_t *low = pairs + 2 * q, *high = low + 8;
    return make_uint4(__byte_perm(low[0], high[0], 0x5410), divided(__byte_perm(low[0], high[0], 0x7632)),
                      __byte_perm(low[1], high[1], 0x5410), divided(__byte_perm(low[1], high[1], 0x7632)));
  }

 private:
  static __device__ __forceinline__ uint32_t divided(uint32_t pair) {
    if constexpr (__is_same(T, __half)) asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x2C002C00u));
    return pair;
  }

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

// Adds up the sums of the lanes of a group (a row's four parts are neighbours) and writes them.
template <typename SHAPE>
__device__ __forceinline__ void write_sums(float2 sums, float2* to, int row, int part) {
#pragma unroll
  for (int distance = 1; distance < 4 / SHAPE::kGroups; distance *= 2) {
    sums.x += __shfl_xor_sync(~0u, sums.x, distance), sums.y += __shfl_xor_sync(~0u, sums.y, distance);
  }
  if (part * SHAPE::kGroups % 4 == 0) to[part * SHAPE::kGroups / 4 * SHAPE::kTileRows + row] = sums;
}

// One CTA a block of 128 input features of a tile; a thread takes 32 features of a row at a time. Of rows that do not
// exist, zeros. [block of the pair][group][row]: sums; then [column of 8 rows][block][32 features][lane][16 bytes].
template <typename SHAPE>
__device__ __forceinline__ void arrange_tile(const ExpertParams& p, const int* tiles_until) {
  const int block = blockIdx.x, tile = blockIdx.y, pairs = (gridDim.x + 1) / 2;
  const RowTile rows = tile_at(p, SHAPE::kTileRows, tiles_until, tile);
  char* base = static_cast<char*>(p.arranged) + (int64_t{tile} * pairs + block / 2) * SHAPE::kRowBytes;
  float2* sums = reinterpret_cast<float2*>(base + block % 2 * SHAPE::kSumBytes / 2);
  char* operands = base + SHAPE::kSumBytes + block % 2 * SHAPE::kColumnBytes;
  const int used = (rows.num_rows + 7) / 8 * 8;
  for (int item = threadIdx.x; item < used * 4; item += blockDim.x) {
    const int row = item / 4, part = item % 4;
    const bool exists = row < rows.num_rows;
    int source = rows.first_row + row;
    if (exists && p.tokens != nullptr) source = __ldcg(p.tokens + source);
    const auto* from = static_cast<const typename SHAPE::Input*>(p.x) + source * p.x_row_stride + block * 128 + 32 * part;
    const Features32<SHAPE> features(exists ? from : nullptr);
    uint4* to = reinterpret_cast<uint4*>(operands + row / 8 * SHAPE::kBlocks * SHAPE::kColumnBytes + part * 512) + row % 8 * 4;
#pragma unroll
    for (int q = 0; q < 4; ++q) to[q] = features.operand(q);
    write_sums<SHAPE>(features.sums(), sums, row, part);
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
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

template <typename SHAPE>
__device__ __forceinline__ int row_bytes(const Pass& pass) {
  return SHAPE::kSumBytes + (pass.rows.num_rows + 7) / 8 * SHAPE::kBlocks * SHAPE::kColumnBytes;
}

// One copy of the codes and one of the words of each part: a warp takes some 110 clocks to issue a copy, however large,
// and 22 a stage bounded the kernel. Parts stand kPassUnits strips of full pairs apart.
template <typename SHAPE>
__device__ __forceinline__ void copy_weights(const ExpertParams& p, const ExpertRing<SHAPE>& ring, int stage,
                                             const StageWalk<SHAPE>& at, uint64_t policy) {
  const int lane = threadIdx.x % 32, num_blocks = at.count(), part = lane / 2;
  const int part_strips = p.out_features / (16 * SHAPE::kUnit), word_blocks = p.is_channelwise != 0 ? 1 : num_blocks;
  const int code_bytes = at.pass.num_units * num_blocks * SHAPE::kBlockBytes;
  const int word_bytes = at.pass.num_units * word_blocks * 64 * SHAPE::kGroups;
  const uint32_t filled = ring.full(stage);
  if (lane == 0) arrive_expecting(filled, SHAPE::kUnit * (code_bytes + word_bytes) + row_bytes<SHAPE>(at.pass));
  if (lane >= 2 * SHAPE::kUnit) return;
  const int64_t before = int64_t{p.num_experts} * (p.out_features / 16) * at.block;   // of all strips
  const int64_t strip = int64_t{at.pass.rows.expert} * (p.out_features / 16) + part * part_strips + at.pass.unit;
  if (lane % 2 == 0) {
    copy_bulk(ring.codes(stage) + part * SHAPE::kPassUnits * SHAPE::kBlocks * SHAPE::kBlockBytes,
              reinterpret_cast<const char*>(p.codes) + (before + strip * num_blocks) * SHAPE::kBlockBytes, code_bytes, filled,
              policy);
  } else {
    const int64_t from = (p.is_channelwise != 0 ? 0 : before) + strip * word_blocks;
    copy_bulk(ring.words(stage) + part * SHAPE::kPassUnits * SHAPE::kBlocks * 64 * SHAPE::kGroups,
              reinterpret_cast<const char*>(p.words) + from * 64 * SHAPE::kGroups, word_bytes, filled, policy);
  }
}

template <typename SHAPE>
__device__ __forceinline__ void copy_rows(const ExpertParams& p, const ExpertRing<SHAPE>& ring, int stage,
                                          const StageWalk<SHAPE>& at) {
  if (threadIdx.x % 32 != 0) return;
  const int pairs = (p.in_features / 128 + 1) / 2;
  const char* rows = static_cast<const char*>(p.arranged) + (int64_t{at.pass.tile} * pairs + at.block / 2) * SHAPE::kRowBytes;
  copy_bulk(ring.rows(stage), rows, row_bytes<SHAPE>(at.pass), ring.full(stage), keep_policy());
}

// Weights of the first stages are on their way before the rows are arranged.
template <typename SHAPE>
__device__ __forceinline__ void fill_stages(const ExpertParams& p, const ExpertRing<SHAPE>& ring, const int* tiles_until) {
  const uint64_t policy = evict_first_policy();
  StageWalk<SHAPE> ahead(p, tiles_until), walk(p, tiles_until);
  int filled = 0;
  for (; filled < SHAPE::kStages && ahead.has_more; ++filled, ahead.advance()) {
    copy_weights<SHAPE>(p, ring, filled, ahead, policy);
  }
  await_previous();
  for (int stage = 0; stage < filled; ++stage, walk.advance()) copy_rows<SHAPE>(p, ring, stage, walk);
  RingPlace<SHAPE::kStages> place;
  place.parity = 1;   // the second pass
#pragma unroll 1
  for (; ahead.has_more; ahead.advance(), place.advance()) {
    wait_barrier(ring.empty(place.stage), place.parity ^ 1);
    copy_weights<SHAPE>(p, ring, place.stage, ahead, policy);
    copy_rows<SHAPE>(p, ring, place.stage, ahead);
  }
}

}  // namespace slipstream
