// Sizes of one variant of the prefill kernel over keys and values that lie side by side (un-absorbed latent attention).
#pragma once

#include "mma/prefill_softmax.cuh"
#include "params/ragged_params.h"
#include "schedule/prefill_shape.cuh"

namespace slipstream {

// q and keys as [rows][heads][dims]; shared_keys: the part of a key that all heads share, [rows][1][dims].
struct RaggedMaps : PrefillMaps {
  CUtensorMap shared_keys;
};

// OWN_DIM, SHARED_DIM: of a key, its head's own features and those that all heads share. Multiples of 64.
template <typename T, int OWN_DIM, int SHARED_DIM, int VALUE_DIM>
struct RaggedShape : PrefillShape<T, PrefillKv::k16Bit, VALUE_DIM, false, false> {
  using Params = RaggedParams;
  using Maps = RaggedMaps;
  static constexpr bool kIsRagged = true;
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kRows = 64 * kWarpgroups;
  // With 256 values, 128 keys would need 224 registers for sums, and 64 KB for each of their stages.
  static constexpr int kKeys = VALUE_DIM > 128 ? 64 : 128;
  static constexpr int kOwnKeySlabs = OWN_DIM / 64;
  static constexpr int kKeySlabs = (OWN_DIM + SHARED_DIM) / 64;
  static constexpr int kSlabs = VALUE_DIM / 64;
  static constexpr int kQuerySlabs = kKeySlabs;
  static constexpr int kQueryDim = OWN_DIM + SHARED_DIM;
  static constexpr int kOwnDim = OWN_DIM;
  static constexpr int kSharedDim = SHARED_DIM;
  static constexpr int kQuerySlab = kRows * kSwizzleBytes;
  static constexpr int kKeySlab = kKeys * kSwizzleBytes;
  static constexpr int kQueryBytes = kQuerySlabs * kQuerySlab;
  static constexpr int kKeyBytes = kKeySlabs * kKeySlab;
  static constexpr int kValueBytes = kSlabs * kKeySlab;
  static constexpr int kLoadRegisters = 24;
  static constexpr int kRegisters = 240;

  // The queries' place among their keys; without a mask each is at the last one, or behind it.
  __device__ __forceinline__ static int first_position(const Params& p, const Work& work) {
    return work.seq_len - (p.is_causal ? work.query_len : 1);
  }

  // Rows past the request's end, and all without a mask, see its last key and no more.
  __device__ __forceinline__ static void place_rows(const Params& p, const Work& work, RowFacts& facts) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      facts.position[r] = p.is_causal ? min(facts.position[r], work.seq_len - 1) : work.seq_len - 1;
    }
  }

  // Without a mask: up to the last key.
  __device__ __forceinline__ static void widen(const Params& p, Work& work) {
    if (!p.is_causal) work.end_tile = (work.seq_len + kKeys - 1) / kKeys;
  }
};

}  // namespace slipstream
