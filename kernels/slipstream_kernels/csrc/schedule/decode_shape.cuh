// Compile-time shape of one decode attention kernel: bytes of a tile, and how many tiles are kept in flight.
#pragma once

#include "schedule/decode_work.cuh"
#include "formats/kv_format.cuh"

namespace slipstream {

// Shared memory of a Hopper SM for all its CTAs; each also takes 1 KB, and static memory (count_tiles, Merge).
constexpr int kSharedBytes = 228 * 1024;
constexpr int kReservedBytes = 1024 + 256;
// More copies in flight make the SMs' parts of the bandwidth more unequal: 145 us with 3, 147 with 4.
constexpr int kMaxStages = 3;

template <typename T, KvType KV, int HEAD_DIM, int NUM_N>
struct DecodeShape {
  using Format = KvFormat<KV>;
  using Output = T;
  // Operands of the products; queries and probabilities are rounded to it.
  using Operand = std::conditional_t<KV == KvType::k16Bit, T, __half>;

  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kNumN = NUM_N;       // groups of 8 rows of queries
  static constexpr int kRows = 8 * NUM_N;
  static constexpr int kRowBytes = HEAD_DIM * Format::kBits / 8;
  static constexpr int kColumns = (kRowBytes + 15) / 16;
  // An odd number of 16-byte columns puts 8 consecutive rows into different banks.
  static constexpr int kStride = 16 * (kColumns | 1);
  static constexpr int kPairs = (kColumns + 1) / 2;
  static constexpr int kSteps = kColumns * Format::kStepsPerPair / 2;
  static constexpr int kCopyBytes = kRowBytes % 16 == 0 ? 16 : 8;
  static constexpr int kCopiesPerRow = kRowBytes / kCopyBytes;
  static constexpr int kCopies = kTileTokens * kCopiesPerRow;
  static constexpr int kScaleOffset = 2 * kTileTokens * kStride;
  static constexpr int kStageBytes = kScaleOffset + (Format::kIsInteger ? 2 * kTileTokens * 4 : 0);

  // Partial outputs of the warps are merged in rounds of 8 rows x 128 dims.
  static constexpr int kRoundSteps = kSteps < 8 ? kSteps : 8;
  static constexpr int kRoundStride = 16 * kRoundSteps + 4;
  static constexpr int kQueryBytes = NUM_N * kSteps * 32 * 8;
  static constexpr int fixed_bytes(int warps) {
    return kQueryBytes + warps * (8 * kRoundStride + 2 * kRows) * 4 + kMaxRequests * 4;
  }
  static constexpr int stages(int ctas, int warps) {
    const int stages = (kSharedBytes / ctas - kReservedBytes - fixed_bytes(warps)) / (warps * kStageBytes);
    return stages < kMaxStages ? stages : kMaxStages;
  }
  // CTAs of an SM stream while others begin or end a unit: three where a tile has few bytes, so that enough of them are on
  // their way, and few rows, so that registers suffice; else two, if they leave two stages each.
  static constexpr int kWarps = 4;
  static constexpr bool kIsSmall = HEAD_DIM <= 64 ? NUM_N <= 2 : NUM_N == 1 && kRowBytes <= 96;
  static constexpr int kCtas = kIsSmall ? 3 : stages(2, kWarps) >= 2 ? 2 : 1;
  static constexpr int kStages = stages(kCtas, kWarps);
  static constexpr int kThreads = 32 * kWarps;
  // The next unit's queries are on their way while this one's parts are merged: 0.3 to 1.5 us of a launch, if there are
  // registers for them.
  static constexpr bool kLoadsQueriesEarly = NUM_N * HEAD_DIM <= 256;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kTotalBytes = kRingBytes + fixed_bytes(kWarps);
  static_assert(kStages >= 2 && kTotalBytes + kReservedBytes <= kSharedBytes / kCtas, "tile too large");

  // Of beginning and ending a work item: the time of about 64 KB of tiles, 2 to 3 us.
  static constexpr int kUnitCost = 1 + (64 << 10) / (2 * kTileTokens * kRowBytes);
  using Walk = ShareWalk<kRows, kUnitCost>;

  // Dynamic shared memory, in this order.
  static constexpr int kQueryOffset = kRingBytes;
  static constexpr int kRoundOffset = kQueryOffset + kQueryBytes;
  static constexpr int kStateOffset = kRoundOffset + kWarps * 8 * kRoundStride * 4;
  static constexpr int kEndsOffset = kStateOffset + kWarps * kRows * 2 * 4;
};

}  // namespace slipstream
