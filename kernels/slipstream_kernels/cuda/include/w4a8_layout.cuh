// Order of 4-bit weights in memory, shared by the streaming kernel of few tokens and the CUTLASS kernel of many; the
// same map in torch is slipstream_kernels/int4_layout.py.
//
// A strip is 16 output features: its fragments of 32 input features follow each other, 256 bytes each, so that any run
// of them is one copy. Of a fragment lane l's 8 bytes are the A operand of one e4m3 product of 16 x 32, a word for row
// l / 4 and one for row l / 4 + 8. Nibble i of a word is input feature 4 (l % 4) + i, nibble i + 4 the one 16 further:
// a pair that one mask takes out of the word, as two 16-bit numbers of the same row.
#pragma once

#include <cute/layout.hpp>

namespace slipstream {

using Int4Layout = cute::Layout<
    cute::Shape<cute::Shape<cute::_8, cute::_2, int>, cute::Shape<cute::_4, cute::_4, cute::_2, int>, int>,
    cute::Stride<cute::Stride<cute::_64, cute::_8, int64_t>, cute::Stride<cute::_1, cute::_16, cute::_4, cute::_512>,
                 int64_t>>;

CUTE_HOST_DEVICE Int4Layout int4_layout(int out_features, int in_features) {
  using namespace cute;
  return Int4Layout{make_shape(make_shape(_8{}, _2{}, out_features / 16), make_shape(_4{}, _4{}, _2{}, in_features / 32), 1),
                    make_stride(make_stride(_64{}, _8{}, int64_t(16) * in_features),
                                make_stride(_1{}, _16{}, _4{}, _512{}), int64_t(0))};
}

}  // namespace slipstream
