// Shared memory of the verify kernel, and the work item of a CTA.
#pragma once

#include <type_traits>

#include "mma/hopper_mma.cuh"
#include "formats/kv_format.cuh"
#include "params/verify_params.h"

namespace slipstream {

// KV: k16Bit (T's own) or kFp8E4m3, whose tiles arrive as they are and become fp16 in shared memory.
template <typename T, KvType KV>
struct VerifyShape {
  static constexpr bool kIsFp8 = KV == KvType::kFp8E4m3;
  static_assert(kIsFp8 || KV == KvType::k16Bit);
  using Element = T;
  using Operand = std::conditional_t<kIsFp8, __half, T>;
  static constexpr int kHeadDim = 128;
  static constexpr int kRows = 64;     // (token, query head of one kv head), the tall side of a product
  static constexpr int kKeys = 64;     // of a tile
  static constexpr int kStages = 3;    // so that what is left of a split context is all on its way at once
  static constexpr int kThreads = 128;
  static constexpr int kSlabs = kHeadDim / 64;
  static constexpr int kChunks = kHeadDim * 2 / 16;            // 16 bytes each, of an operand's row
  static constexpr int kSlabBytes = kKeys * kSwizzleBytes;     // 64 columns of all rows
  static constexpr int kTileBytes = kSlabs * kSlabBytes;       // keys, values or queries
  // The same sizes of rows as the cache stores them.
  static constexpr int kCacheChunks = kIsFp8 ? kChunks / 2 : kChunks;
  static constexpr int kCacheTileBytes = kKeys * kCacheChunks * 16;
  static constexpr int kStageBytes = 2 * kCacheTileBytes;
  // Behind the queries the operands of the tile that is multiplied, unless they are multiplied where they arrive.
  static constexpr int kOperandOffset = kTileBytes;
  static constexpr int kRingOffset = kOperandOffset + (kIsFp8 ? 2 * kTileBytes : 0);
  static constexpr int kTotalBytes = kRingOffset + kStages * kStageBytes;
  // Behind the queries: partial results that the CTAs of a cluster read from each other at the end.
  static constexpr int kSumOffset = kOperandOffset;
  static constexpr int kSumStride = kHeadDim + 8;  // words of a row; eight rows of pairs then lie in different banks
  static constexpr int kStateOffset = kSumOffset + kRows * kSumStride * 4;
  static_assert(kRows == kKeys && kStateOffset + kRows * 8 <= kTotalBytes);
  // Two CTAs to an SM, each with 1 KB that the system takes.
  static_assert(2 * (kTotalBytes + 1024) < 228 * 1024);
};

// 64 rows of one request and kv head, and this CTA's tiles of their keys.
struct VerifyWork {
  int request, kv_head, first_row;
  int start, query_len;      // of the request's tokens in q
  int seq_len;
  int tile, end_tile;

  // False if the request has no such rows.
  template <int KEYS, int ROWS>
  __device__ __forceinline__ bool find(const VerifyParams& p, int unit, int rank) {
    const int row_tile = unit % p.row_tiles;
    kv_head = unit / p.row_tiles % p.num_kv_heads;
    request = unit / p.row_tiles / p.num_kv_heads;
    start = p.query_start_loc[request];
    query_len = p.query_start_loc[request + 1] - start;
    first_row = row_tile * ROWS;
    seq_len = p.seq_lens[request];
    const int num_tiles = (seq_len + KEYS - 1) / KEYS;
    tile = num_tiles * rank / p.splits;
    end_tile = num_tiles * (rank + 1) / p.splits;
    return first_row < query_len * p.group;
  }

  __device__ __forceinline__ int prefix() const { return seq_len - query_len; }
};

}  // namespace slipstream
