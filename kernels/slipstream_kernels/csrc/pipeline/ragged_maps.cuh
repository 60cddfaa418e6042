// The tensor maps of a launch of ragged attention, made on the host.
#pragma once

#include "host/tensor_map.h"
#include "schedule/ragged_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct RaggedMapEncoder {
  static constexpr auto kType = std::is_same_v<typename SHAPE::Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const RaggedParams& p;

  // Slabs of 64 columns by a tile's rows of one head.
  bool encode(CUtensorMap* map, const void* data, uint64_t width, uint64_t heads, uint64_t rows, int64_t head_stride,
              int64_t row_stride, uint32_t tile_rows) const {
    const Extent<3> extent{{width, heads, rows},
                           {head_stride * sizeof(uint16_t), row_stride * sizeof(uint16_t)},
                           {64, 1, tile_rows}};
    return encode_tensor_map(map, kType, CU_TENSOR_MAP_SWIZZLE_128B, data, extent);
  }

  bool run(RaggedMaps* maps) const {
    const uint64_t heads = p.num_q_heads, num_keys = p.num_keys;
    return encode(&maps->q, p.q, SHAPE::kQueryDim, heads, p.num_tokens, p.q_head_stride, p.q_token_stride,
                  SHAPE::kRows) &&
           encode(&maps->keys, p.key_cache, SHAPE::kOwnDim, heads, num_keys, p.key_head_stride, p.key_token_stride,
                  SHAPE::kKeys) &&
           encode(&maps->shared_keys, p.shared_keys, SHAPE::kSharedDim, 1, num_keys, p.shared_token_stride,
                  p.shared_token_stride, SHAPE::kKeys) &&
           encode(&maps->values, p.value_cache, SHAPE::kHeadDim, heads, num_keys, p.value_head_stride,
                  p.value_token_stride, SHAPE::kKeys);
  }
};

}  // namespace slipstream
