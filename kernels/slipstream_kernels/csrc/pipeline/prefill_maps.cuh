// The tensor maps of a launch of the prefill kernel, made on the host.
#pragma once

#include <algorithm>

#include "pipeline/prefill_load.cuh"
#include "host/tensor_map.h"

namespace slipstream {

template <typename SHAPE>
struct MapEncoder {
  static constexpr auto kType = std::is_same_v<typename SHAPE::Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const PrefillParams& p;

  bool encode_queries(CUtensorMap* map) const {
    const uint32_t pack = 1 << p.pack_log2;
    const Extent<3> q{{SHAPE::kHeadDim, static_cast<uint64_t>(p.num_q_heads), static_cast<uint64_t>(p.num_tokens)},
                   {p.q_head_stride * sizeof(uint16_t), p.q_token_stride * sizeof(uint16_t)},
                   {64, pack, SHAPE::kRows / pack}};
    return encode_tensor_map(map, kType, CU_TENSOR_MAP_SWIZZLE_128B, p.q, q);
  }

  // Quantised rows count in bytes.
  template <bool IS_KEYS>
  bool encode_cache(CUtensorMap* map) const {
    constexpr bool kIsStaged = IS_KEYS ? SHAPE::kHasStagedKeys : SHAPE::kHasStagedValues;
    constexpr bool kIsRaw = SHAPE::kIsConverted || (IS_KEYS && SHAPE::kHasFp8Keys);
    constexpr int kBits = SHAPE::kIsConverted ? KvFormat<SHAPE::kKvType>::kBits : kIsRaw ? 8 : 16;
    constexpr uint64_t kRowBytes = SHAPE::kHeadDim * kBits / 8, kRow = kIsRaw ? kRowBytes : SHAPE::kHeadDim;
    constexpr uint32_t kBox = SHAPE::kIsConverted ? SHAPE::kRawRowBytes : kIsRaw ? kSwizzleBytes : 64;
    static_assert(kRowBytes % 16 == 0);
    const int block_log2 = kIsStaged ? kStagedRowsLog2 : p.block_size_log2;
    const uint64_t num_blocks = kIsStaged ? uint64_t{1} * p.num_requests * p.staged_blocks : p.num_blocks;
    const uint64_t part_rows = 1 << std::min(block_log2, kMaxPartRowsLog2);
    const uint64_t num_parts = num_blocks * p.num_kv_heads * ((1 << block_log2) / part_rows);
    const Extent<3> cache{{kRow, part_rows, num_parts}, {kRowBytes, part_rows * kRowBytes},
                       {kBox, static_cast<uint32_t>(part_rows), 1}};
    constexpr auto kCacheType = kIsRaw ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                       : kIsStaged ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : kType;
    constexpr auto kSwizzle = SHAPE::kIsConverted ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
    return encode_tensor_map(map, kCacheType, kSwizzle, IS_KEYS ? p.key_cache : p.value_cache, cache);
  }

  // Blocks of 64 tokens, transposed: a row of each dimension.
  bool encode_fp8_values(CUtensorMap* map) const {
    constexpr uint64_t kRow = 1 << kStagedRowsLog2;
    const uint64_t num_blocks = uint64_t{1} * p.num_requests * p.staged_blocks * p.num_kv_heads;
    const Extent<3> staged{{kRow, SHAPE::kHeadDim, num_blocks}, {kRow, kRow * SHAPE::kHeadDim},
                           {kRow, SHAPE::kHeadDim, 1}};
    return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_64B, p.value_cache, staged);
  }

  bool encode_values(CUtensorMap* map) const {
    if constexpr (SHAPE::kHasFp8Values) return encode_fp8_values(map);
    else return encode_cache<false>(map);
  }

  bool run(PrefillMaps* maps) const {
    return encode_queries(&maps->q) && encode_cache<true>(&maps->keys) && encode_values(&maps->values);
  }
};

}  // namespace slipstream
