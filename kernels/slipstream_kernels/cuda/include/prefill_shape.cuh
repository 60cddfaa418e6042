// What a variant of the prefill kernel is, and where its shared memory and barriers lie.
#pragma once

#include <type_traits>

#include "hopper_copy.cuh"
#include "hopper_mma.cuh"
#include "kv_format.cuh"
#include "prefill_work.cuh"

namespace slipstream {

// SLIPSTREAM_* choices as a type. Tiles are the largest whose scores, probabilities and outputs the registers hold and
// whose two stages fit into shared memory. Measured: docs/LOG.md, 2026-11-21.
// Operands lie in slabs of 64 columns (128 swizzled bytes) by all rows of a tile. A cache of another type than the
// queries passes through a raw ring, in slabs of the same columns, and is multiplied as fp16, which holds them all.
template <typename T, KvType KV, int HEAD_DIM, bool HAS_SOFT_CAP, bool HAS_ALIBI>
struct PrefillShape {
  static constexpr bool kIsQuantized = KV != KvType::k16Bit;
  static constexpr bool kHasTokenScales = KV == KvType::kInt8 || KV == KvType::kInt4;
  using Element = T;
  using Operand = std::conditional_t<kIsQuantized, __half, T>;
  static constexpr KvType kKvType = KV;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr bool kHasSoftCap = HAS_SOFT_CAP;
  static constexpr bool kHasAlibi = HAS_ALIBI;
  static constexpr int kWarpgroups = HEAD_DIM == 64 && !kIsQuantized ? 3 : 2;  // that multiply, 64 rows each
  static constexpr int kFirstMultiplier = kIsQuantized ? 2 : 1;
  static constexpr int kThreads = 128 * (kFirstMultiplier + kWarpgroups);
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kKeys = HEAD_DIM == 128 && !kIsQuantized ? 192 : 128;
  static constexpr int kSlabs = HEAD_DIM / 64;
  static constexpr int kStages = 2;
  static constexpr int kQuerySlab = kRows * kSwizzleBytes;
  static constexpr int kKeySlab = kKeys * kSwizzleBytes;
  static constexpr int kQueryBytes = kSlabs * kQuerySlab;
  static constexpr int kStageBytes = kSlabs * kKeySlab;
  static constexpr int kConverterWarps = kIsQuantized ? 4 : 0;
  static constexpr int kRawStages = kIsQuantized ? 3 : 0;
  static constexpr int kRawRowBytes = 64 * KvFormat<KV>::kBits / 8;
  static constexpr int kRawSlab = kKeys * kRawRowBytes;
  static constexpr int kScaleOffset = kSlabs * kRawSlab;
  static constexpr int kRawBytes = kScaleOffset + (kHasTokenScales ? 4 * kKeys : 0);
  // Of each thread of a warpgroup by its role, in units of 8: 65536 in all.
  static constexpr int kLoadRegisters = kThreads == 384 ? 24 : 32;
  static constexpr int kConvertRegisters = 64;
  static constexpr int kRegisters = kThreads == 384 ? 240 : kIsQuantized ? 208 : 160;
};

template <typename SHAPE>
struct PrefillMemory {
  static constexpr int kKeyOffset = SHAPE::kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + SHAPE::kStages * SHAPE::kStageBytes;
  static constexpr int kRawOffset = kValueOffset + SHAPE::kStages * SHAPE::kStageBytes;
  static constexpr int kWorkOffset = kRawOffset + SHAPE::kRawStages * SHAPE::kRawBytes;
  static constexpr int kBarrierOffset = kWorkOffset + 2 * sizeof(Work);
  static constexpr int kRawBarriers = 6 + 4 * SHAPE::kStages;
  static constexpr int kBytes = kBarrierOffset + 8 * (kRawBarriers + 2 * SHAPE::kRawStages);
  // The swizzle wants units of 1024 bytes aligned to their size.
  static constexpr int kAllocatedBytes = kBytes + kSwizzleUnit;

  char* base;
  uint32_t address;

  __device__ __forceinline__ explicit PrefillMemory(char* memory) {
    base = memory + (-shared_address(memory) & (kSwizzleUnit - 1));
    address = shared_address(base);
  }

  __device__ __forceinline__ uint32_t queries() const { return address; }
  __device__ __forceinline__ uint32_t keys(int stage) const { return address + kKeyOffset + stage * SHAPE::kStageBytes; }
  __device__ __forceinline__ uint32_t values(int stage) const {
    return address + kValueOffset + stage * SHAPE::kStageBytes;
  }
  __device__ __forceinline__ uint32_t raw(int stage) const { return address + kRawOffset + stage * SHAPE::kRawBytes; }
  __device__ __forceinline__ Work* work(int slot) const { return reinterpret_cast<Work*>(base + kWorkOffset) + slot; }
  __device__ __forceinline__ char* pointer(uint32_t to) const { return base + (to - address); }

  __device__ __forceinline__ uint32_t barrier(int index) const { return address + kBarrierOffset + 8 * index; }
  __device__ __forceinline__ uint32_t query_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t query_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t work_full(int slot) const { return barrier(2 + slot); }
  __device__ __forceinline__ uint32_t work_empty(int slot) const { return barrier(4 + slot); }
  __device__ __forceinline__ uint32_t key_full(int stage) const { return barrier(6 + stage); }
  __device__ __forceinline__ uint32_t key_empty(int stage) const { return barrier(6 + SHAPE::kStages + stage); }
  __device__ __forceinline__ uint32_t value_full(int stage) const { return barrier(6 + 2 * SHAPE::kStages + stage); }
  __device__ __forceinline__ uint32_t value_empty(int stage) const { return barrier(6 + 3 * SHAPE::kStages + stage); }
  __device__ __forceinline__ uint32_t raw_full(int stage) const { return barrier(kRawBarriers + stage); }
  __device__ __forceinline__ uint32_t raw_empty(int stage) const {
    return barrier(kRawBarriers + SHAPE::kRawStages + stage);
  }

  // One thread. What copies fill completes with their bytes, the rest when each warp that reads or writes has arrived.
  __device__ __forceinline__ void init() const {
    constexpr int kReaders = 4 * SHAPE::kWarpgroups;
    init_barrier(query_full(), 1);
    init_barrier(query_empty(), kReaders);
    for (int slot = 0; slot < 2; ++slot) {
      init_barrier(work_full(slot), 1);
      init_barrier(work_empty(slot), kReaders + SHAPE::kConverterWarps);
    }
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(key_full(stage), SHAPE::kIsQuantized ? SHAPE::kConverterWarps : 1);
      init_barrier(value_full(stage), SHAPE::kIsQuantized ? SHAPE::kConverterWarps : 1);
      init_barrier(key_empty(stage), kReaders);
      init_barrier(value_empty(stage), kReaders);
    }
    for (int stage = 0; stage < SHAPE::kRawStages; ++stage) {
      init_barrier(raw_full(stage), 1);
      init_barrier(raw_empty(stage), SHAPE::kConverterWarps);
    }
    publish_barriers();
  }

  // The whole warp: takes over the work at a slot and gives the slot back.
  __device__ __forceinline__ Work receive(RingPlace<2>& slot) const {
    wait_barrier(work_full(slot.stage), slot.parity);
    const Work received = *work(slot.stage);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(work_empty(slot.stage));
    slot.advance();
    return received;
  }
};

}  // namespace slipstream
