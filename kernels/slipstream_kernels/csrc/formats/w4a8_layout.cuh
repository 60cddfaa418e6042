// Orders of 4-bit weights in memory.
//
// For 16-bit rows, and of experts (slipstream_kernels/int4_layout.py): a strip is 16 output features; its fragments of 32
// input features follow each other, 256 bytes each, so that any run of them is one copy. Of a fragment lane l's 8 bytes are
// a word for row l / 4 and one for row l / 4 + 8. Nibble i of a word is input feature 4 (l % 4) + i, nibble i + 4 the one 16
// further: a pair that one mask takes out of the word, as two 16-bit numbers of the same row.
//
// For FP8 rows (slipstream_kernels/w4a8_layout.py; mixed_gemm_formats.cuh reads it for few, and below CUTLASS for many):
// blocks of 128 input features follow each other; in one, strips of 16 output features, 1 KB each: so any run of strips is
// one copy. A strip's two halves of 64 input features hold 16 bytes for each lane: of two products of 32, a word for row
// l / 4 and one for row l / 4 + 8. Nibble 2 i of a word is input feature 4 (l % 4) + i, nibble 2 i + 1 the one 16 further:
// a mask makes of them the operands of products.
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
