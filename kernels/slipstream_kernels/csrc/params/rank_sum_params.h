// Arguments of the sum over ranks, as they cross the C ABI (mirrored in comm/cuda/rank_sum.py).
// Pointers first, then 64-bit, then 32-bit fields: no padding on either side.
#pragma once

#include <cstdint>

constexpr int kMaxRanks = 8;

struct RankSumParams {
  const void* partial;             // what this rank has of the sum, 8 bytes a pack
  void* total;
  uint32_t* counters;              // [2], this rank's: sums so far, CTAs of the current one that have ended
  uint4* mailboxes[kMaxRanks];     // of each rank, as this GPU sees them: [2, side_units], each of 16 bytes
  int64_t side_units;
  int64_t num_packs;
  int64_t num_units;               // that hold the packs: one each, or eight of 15
  int64_t part;                    // units that a rank sums for all, a multiple of 32; 0: every rank sums all
  int32_t rank;
  int32_t num_ranks;
  int32_t is_wide;                 // lines of 128 bytes
  int32_t is_dependent;
};
