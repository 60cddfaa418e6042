// The producers: a kernel before the GEMM permutes each tile of tokens into 16-bit operands; a warp of the GEMM issues bulk
// copies.
#pragma once

#include <cuda_fp8.h>

#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/grouped_w4a16_shape.cuh"
#include "ptx/hopper_copy.cuh"
#include "mma/warp_mma.cuh"

namespace slipstream {

// A 4-bit value q in the low bits of fp16 1024 makes 1024 + q, four bits higher 1024 + 16 q. In the low bits of bf16 128
// (7 bits of fraction) it makes 128 + q. So weights become operands without arithmetic; the bias that they carry times
// the sum of the activations is subtracted from a group's sum.
template <typename T>
struct QweightBias;
template <>
struct QweightBias<__half> {
  static constexpr float kLow = 1024.0f, kHigh = 64.0f;   // kHigh: the activations are divided by 16
};
template <>
struct QweightBias<__nv_bfloat16> {
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

  // (the sum with the bias of the weights as factor, the sum).
  __device__ __forceinline__ float2 sums() const {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      even += to_float(reinterpret_cast<const T*>(pairs)[2 * i]), odd += to_float(reinterpret_cast<const T*>(pairs)[2 * i + 1]);
    }
    return make_float2(QweightBias<T>::kLow * even + QweightBias<T>::kHigh * odd, even + odd);
  }

  // Pairs (4 q + i, 16 + 4 q + i), i = 0..3: the B operand of two products for lanes l % 4 = q. Odd i meet weights that
  // lie four bits higher.
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

// Adds the sums of a group's lanes (the four quarters of a row's block are neighbours) and writes them.
template <typename SHAPE>
__device__ __forceinline__ void write_sums(float2 sums, float2* to, int row, int quarter) {
#pragma unroll
  for (int distance = 1; distance < 4 / SHAPE::kGroups; distance *= 2) {
    sums.x += __shfl_xor_sync(~0u, sums.x, distance), sums.y += __shfl_xor_sync(~0u, sums.y, distance);
  }
  if (quarter * SHAPE::kGroups % 4 == 0) to[quarter * SHAPE::kGroups / 4 * SHAPE::kTileRows + row] = sums;
}

// One CTA a block of 128 input features of a tile of tokens; a thread takes 32 features of a row at a time. Missing rows
// are zeros. Result: sums [block of the pair][group][row], then [column of 8 rows][block][32 features][lane][16 bytes].
template <typename SHAPE>
__device__ __forceinline__ void permute_token_tile(const GroupedGemmParams& p, const int* token_tile_ends) {
  const int block = blockIdx.x, token_tile = blockIdx.y, pairs = (gridDim.x + 1) / 2;
  const TokenTile rows = token_tile_at(p, SHAPE::kTileRows, token_tile_ends, token_tile);
  char* base = static_cast<char*>(p.permuted_x) + (int64_t{token_tile} * pairs + block / 2) * SHAPE::kRowBytes;
  float2* sums = reinterpret_cast<float2*>(base + block % 2 * SHAPE::kSumBytes / 2);
  char* operands = base + SHAPE::kSumBytes + block % 2 * SHAPE::kColumnBytes;
  const int used = (rows.num_rows + 7) / 8 * 8;
  for (int item = threadIdx.x; item < used * 4; item += blockDim.x) {
    const int row = item / 4, quarter = item % 4;
    const bool exists = row < rows.num_rows;
    int source = rows.first_row + row;
    if (exists && p.tokens != nullptr) source = __ldcg(p.tokens + source);
    const auto* from = static_cast<const typename SHAPE::Input*>(p.x) + source * p.x_row_stride + block * 128 + 32 * quarter;
    const Features32<SHAPE> features(exists ? from : nullptr);
    char* column = operands + row / 8 * SHAPE::kBlocks * SHAPE::kColumnBytes;
    uint4* to = reinterpret_cast<uint4*>(column + quarter * 512) + row % 8 * 4;
#pragma unroll
    for (int q = 0; q < 4; ++q) to[q] = features.operand(q);
    write_sums<SHAPE>(features.sums(), sums, row, quarter);
    if (block == 0 && quarter == 0) {
      const bool is_scaled = exists && p.x_scale != nullptr;
      p.row_scale[token_tile * SHAPE::kTileRows + row] = is_scaled ? __ldcg(p.x_scale + source) : 1.0f;
    }
  }
}

// Shared addresses in the ring.
template <typename SHAPE>
struct GroupedW4A16Memory {
  uint32_t base;

  __device__ __forceinline__ uint32_t weights(int stage) const { return base + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t scales(int stage) const { return weights(stage) + SHAPE::kWeightBytes; }
  __device__ __forceinline__ uint32_t rows(int stage) const { return scales(stage) + SHAPE::kScaleBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + SHAPE::kBarrierOffset + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

template <typename SHAPE>
__device__ __forceinline__ int row_bytes(const Pass& pass) {
  return SHAPE::kSumBytes + (pass.rows.num_rows + 7) / 8 * SHAPE::kBlocks * SHAPE::kColumnBytes;
}

// One copy of weights and one of scales for each tile of an item (gate and up): a warp takes some 110 clocks to issue a
// copy of any size, and 22 copies a stage bounded the kernel. Gate and up lie kPassItems tiles of full pairs apart.
template <typename SHAPE>
__device__ __forceinline__ void copy_weights(const GroupedGemmParams& p, const GroupedW4A16Memory<SHAPE>& ring, int stage,
                                             const StageWalk<SHAPE>& at, uint64_t policy) {
  const int lane = threadIdx.x % 32, num_blocks = at.count(), up = lane / 2;
  const int num_items = p.out_features / (16 * SHAPE::kItemTiles), scale_blocks = p.is_channelwise != 0 ? 1 : num_blocks;
  const int weight_bytes = at.pass.num_items * num_blocks * SHAPE::kBlockBytes;
  const int scale_bytes = at.pass.num_items * scale_blocks * 64 * SHAPE::kGroups;
  const uint32_t full = ring.full(stage);
  if (lane == 0) arrive_expecting(full, SHAPE::kItemTiles * (weight_bytes + scale_bytes) + row_bytes<SHAPE>(at.pass));
  if (lane >= 2 * SHAPE::kItemTiles) return;
  const int64_t before = int64_t{p.num_experts} * (p.out_features / 16) * at.block;   // of all tiles
  const int64_t tile = int64_t{at.pass.rows.expert} * (p.out_features / 16) + up * num_items + at.pass.item;
  if (lane % 2 == 0) {
    copy_bulk(ring.weights(stage) + up * SHAPE::kPassItems * SHAPE::kBlocks * SHAPE::kBlockBytes,
              reinterpret_cast<const char*>(p.qweight) + (before + tile * num_blocks) * SHAPE::kBlockBytes, weight_bytes, full,
              policy);
  } else {
    const int64_t from = (p.is_channelwise != 0 ? 0 : before) + tile * scale_blocks;
    copy_bulk(ring.scales(stage) + up * SHAPE::kPassItems * SHAPE::kBlocks * 64 * SHAPE::kGroups,
              reinterpret_cast<const char*>(p.group_scales) + from * 64 * SHAPE::kGroups, scale_bytes, full, policy);
  }
}

template <typename SHAPE>
__device__ __forceinline__ void copy_rows(const GroupedGemmParams& p, const GroupedW4A16Memory<SHAPE>& ring, int stage,
                                          const StageWalk<SHAPE>& at) {
  if (threadIdx.x % 32 != 0) return;
  const int pairs = (p.in_features / 128 + 1) / 2;
  const int64_t pair = int64_t{at.pass.token_tile} * pairs + at.block / 2;
  copy_bulk(ring.rows(stage), static_cast<const char*>(p.permuted_x) + pair * SHAPE::kRowBytes, row_bytes<SHAPE>(at.pass), ring.full(stage), keep_policy());
}

// Copies weights of the first stages before the kernel that permutes the rows has ended.
template <typename SHAPE>
__device__ __forceinline__ void produce_stages(const GroupedGemmParams& p, const GroupedW4A16Memory<SHAPE>& ring,
                                               const int* token_tile_ends) {
  const uint64_t policy = evict_first_policy();
  StageWalk<SHAPE> ahead(p, token_tile_ends), walk(p, token_tile_ends);
  int num_ahead = 0;
  for (; num_ahead < SHAPE::kStages && ahead.has_more; ++num_ahead, ahead.advance()) {
    copy_weights<SHAPE>(p, ring, num_ahead, ahead, policy);
  }
  await_previous();
  for (int stage = 0; stage < num_ahead; ++stage, walk.advance()) copy_rows<SHAPE>(p, ring, stage, walk);
  PipelineState<SHAPE::kStages> state;
  state.parity = 1;   // the second pass
#pragma unroll 1
  for (; ahead.has_more; ahead.advance(), state.advance()) {
    wait_barrier(ring.empty(state.stage), state.parity ^ 1);
    __syncwarp();   // lanes that copy nothing must not fall behind: they would miss a round
    copy_weights<SHAPE>(p, ring, state.stage, ahead, policy);
    copy_rows<SHAPE>(p, ring, state.stage, ahead);
  }
}

}  // namespace slipstream
