// The sums of a consumer's tile in the streaming products, as their epilogue takes them.
#pragma once

namespace slipstream {

// of[half]: of so many columns, in the layout of wgmma_shared.cuh.
template <typename SHAPE>
struct StreamSums {
  float of[SHAPE::kHalves][SHAPE::kBlockSums];
};

}  // namespace slipstream
