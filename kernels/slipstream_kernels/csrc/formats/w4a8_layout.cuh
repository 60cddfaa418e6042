// Orders of 4-bit weights in memory.
//
// For 16-bit rows (slipstream_kernels/gemm/int4_layout.py): a tile is 16 output features. Its fragments of 32 input features
// follow each other, 256 bytes each, so that one copy brings any run of them. A lane's 8 bytes of a fragment are a word for
// row l / 4 and one for row l / 4 + 8. Nibble i of a word is input feature 4 (l % 4) + i, nibble i + 4 the one 16 further:
// one mask takes this pair out of the word, as two 16-bit numbers of the same row.
//
// For FP8 rows (slipstream_kernels/gemm/w4a8_layout.py; the mixed GEMM reads it for few rows, CUTLASS with the layout below
// for many): blocks of 128 input features follow each other; a block has its tiles of 16 output features, 1 KB each, so that
// one copy brings any run of tiles. Each half of a tile's block (64 input features) holds 16 bytes for each lane: for each
// of two products of 32, a word for row l / 4 and one for row l / 4 + 8. Nibble 2 i of a word is input feature
// 4 (l % 4) + i, nibble 2 i + 1 the one 16 further: a mask makes the operands of products.
#pragma once

#include <cute/layout.hpp>

namespace slipstream {

using Int4Layout = cute::Layout<
    cute::Shape<cute::Shape<cute::_8, cute::_2, int>,
                cute::Shape<cute::_4, cute::_4, cute::_2, cute::_2, cute::_2, int>, int>,
    cute::Stride<cute::Stride<cute::_128, cute::_8, cute::_2048>,
                 cute::Stride<cute::_2, cute::_32, cute::_1, cute::_16, cute::_1024, int64_t>, int64_t>>;

CUTE_HOST_DEVICE Int4Layout int4_layout(int out_features, int in_features) {
  using namespace cute;
  return Int4Layout{
      make_shape(make_shape(_8{}, _2{}, out_features / 16), make_shape(_4{}, _4{}, _2{}, _2{}, _2{}, in_features / 128), 1),
      make_stride(make_stride(_128{}, _8{}, _2048{}),
                  make_stride(_2{}, _32{}, _1{}, _16{}, _1024{}, int64_t(128) * out_features), int64_t(0))};
}

}  // namespace slipstream
