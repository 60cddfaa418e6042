// Which of its request's own rows a row sees, for scores of a warpgroup's 64 rows in the accumulator layout of
// hopper_mma.cuh. Rows are (token, head) pairs; a request has up to 64 tokens.
#pragma once

#include "mma/row_state.cuh"

namespace slipstream {

struct DraftMask {
  uint64_t words[2];   // of this thread's two rows: bit i for the request's token i
  int query_len;

  // tree_mask: of the request's tokens, or null: each sees those up to itself.  first_row: of the 64.
  __device__ __forceinline__ DraftMask(const int64_t* tree_mask, int num_tokens, int first_row, int heads)
      : query_len(num_tokens) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      const int token = min(row / heads, num_tokens - 1);
      words[r] = tree_mask == nullptr ? (uint64_t{2} << token) - 1 : tree_mask[token];
    }
  }

  // first: the tile's first slot, counted from the request's own rows.
  template <int N>
  __device__ __forceinline__ void hide(int first, float (&scores)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int token = first + 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
      const bool is_seen = token < 0 || (token < query_len && (words[i / 2 % 2] >> token & 1));
      if (!is_seen) scores[i] = kNothing;
    }
  }
};

}  // namespace slipstream
