// Which of its request's own rows a row sees, for scores of a warpgroup's 64 rows in the accumulator layout of
// hopper_mma.cuh. Rows are (token, head) pairs; a request has up to 64 tokens.
#pragma once

#include "mma/row_state.cuh"

namespace slipstream {

// Of one row: bit i for the request's token i.
struct DraftWord {
  uint64_t bits;
  int query_len;

  // tree_mask: of the request's tokens, or null: each sees those up to itself.  token: the row's, or past the last.
  __device__ __forceinline__ DraftWord(const int64_t* tree_mask, int token, int num_tokens) : query_len(num_tokens) {
    const int own = min(token, num_tokens - 1);
    bits = tree_mask == nullptr ? (uint64_t{2} << own) - 1 : tree_mask[own];
  }

  // token: a slot, counted from the request's own rows.
  __device__ __forceinline__ bool sees(int token) const {
    return token < 0 || (token < query_len && (bits >> token & 1));
  }
};

struct DraftMask {
  DraftWord words[2];   // of this thread's two rows

  // first_row: of the 64.
  __device__ __forceinline__ DraftMask(const int64_t* tree_mask, int num_tokens, int first_row, int heads)
      : words{word_of(tree_mask, num_tokens, first_row, heads), word_of(tree_mask, num_tokens, first_row + 8, heads)} {}

  // first: the tile's first slot, counted from the request's own rows.
  template <int N>
  __device__ __forceinline__ void hide(int first, float (&scores)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int token = first + 8 * (i / 4) + 2 * (threadIdx.x % 4) + i % 2;
      if (!words[i / 2 % 2].sees(token)) scores[i] = kNothing;
    }
  }

 private:
  static __device__ __forceinline__ DraftWord word_of(const int64_t* tree_mask, int num_tokens, int first_row, int heads) {
    const int row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    return DraftWord(tree_mask, row / heads, num_tokens);
  }
};

}  // namespace slipstream
