// Sizes of one variant of the prefill kernel, and the places of its shared memory and barriers.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "ptx/hopper_copy.cuh"
#include "mma/hopper_mma.cuh"
#include "formats/kv_format.cuh"
#include "schedule/prefill_work.cuh"

namespace slipstream {

// Where keys and values come from. Of a cache of another type than the queries:
// kFp8, kInt8, kInt4: the cache, as fp16 operands that a warpgroup of the CTA makes of each tile.
// kStaged: fp16 copies of the requests' blocks (sm90_prefill_stage.cu).
// kFp8Keys: keys of e4m3 as the cache holds them, multiplied by queries rounded to e4m3; values are staged.
// kAllFp8: the same, and probabilities are rounded to e4m3, too; staged values are e4m3, transposed (stage_fp8.py).
enum class PrefillKv { k16Bit = 0, kFp8 = 1, kInt8 = 2, kInt4 = 3, kStaged = 4, kFp8Keys = 5, kAllFp8 = 6 };

// Tokens of a block of staged keys or values.
constexpr int kStagedRowsLog2 = 6;

// The maps of one launch: queries [tokens][heads][dims], keys and values [blocks x kv heads][block_size][dims]
// (blocks cut into parts of at most 64 rows), as bytes if quantised.
struct PrefillMaps {
  CUtensorMap q;
  CUtensorMap keys;
  CUtensorMap values;
};

// SLIPSTREAM_* choices as a type. Tiles are the largest whose scores, probabilities and outputs the registers hold and
// whose two stages fit into shared memory. Measured: docs/measurements, 2026-11-21.
// Operands lie in slabs of 64 columns (128 swizzled bytes) by all rows of a tile; columns beyond a head's are zero, as
// copies from outside of a row are, and are not stored. A cache of another type than the
// queries passes through a raw ring, in slabs of the same columns, and is multiplied as fp16, which holds them all.
template <typename T, PrefillKv KV, int HEAD_DIM, bool HAS_SOFT_CAP, bool HAS_ALIBI>
struct PrefillShape {
  using Params = PrefillParams;
  using Maps = PrefillMaps;
  static constexpr bool kIsRagged = false;
  static constexpr bool kIsConverted = KV == PrefillKv::kFp8 || KV == PrefillKv::kInt8 || KV == PrefillKv::kInt4;
  static constexpr bool kHasFp8Values = KV == PrefillKv::kAllFp8;
  static constexpr bool kHasFp8Keys = KV == PrefillKv::kFp8Keys || kHasFp8Values;
  static constexpr bool kHasStagedKeys = KV == PrefillKv::kStaged;
  static constexpr bool kHasStagedValues = kHasStagedKeys || kHasFp8Keys;
  static constexpr bool kHasTokenScales = KV == PrefillKv::kInt8 || KV == PrefillKv::kInt4;
  static constexpr bool kHasHeadScales = KV != PrefillKv::k16Bit && !kHasTokenScales;
  using Element = T;
  using Operand = std::conditional_t<KV == PrefillKv::k16Bit, T, __half>;      // of probabilities and values
  using KeyOperand = std::conditional_t<kHasFp8Keys, __nv_fp8_e4m3, Operand>;  // of queries and keys
  static constexpr KvType kKvType = kIsConverted ? static_cast<KvType>(KV) : KvType::k16Bit;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kSlabs = (HEAD_DIM + 63) / 64;  // of outputs, and of 16-bit values
  static constexpr int kTileDim = 64 * kSlabs;
  static constexpr bool kHasSoftCap = HAS_SOFT_CAP;
  static constexpr bool kHasAlibi = HAS_ALIBI;
  static constexpr int kWarpgroups = kTileDim == 64 && !kIsConverted ? 3 : 2;  // that multiply, 64 rows each
  static constexpr int kFirstMultiplier = kIsConverted ? 2 : 1;
  static constexpr int kThreads = 128 * (kFirstMultiplier + kWarpgroups);
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kKeys = kHasFp8Values ? 256 : kTileDim == 256 ? 64 : kTileDim == 128 && !kIsConverted ? 192 : 128;
  // Instructions of a product with values: one of 256 columns wants more registers than a launch of 512 threads has.
  static constexpr int kOutputParts = kTileDim == 256 && kIsConverted ? 2 : 1;
  static constexpr int kQuerySlabs = kSlabs;
  static constexpr int kKeySlabs = kTileDim * static_cast<int>(sizeof(KeyOperand)) / kSwizzleBytes;
  static constexpr int kValueSlabs = kHasFp8Values ? kSlabs / 2 : kSlabs;  // transposed ones have as many bytes
  static constexpr float kProbsLog2 = kHasFp8Values ? 8.0f : 0.0f;  // what probabilities are multiplied by
  static constexpr float kFp8ProbsAbove = 0.75f;  // kMostAbove of these: e4m3 holds 448
  static constexpr int kStages = 2;
  static constexpr int kQuerySlab = kRows * kSwizzleBytes;
  static constexpr int kKeySlab = kKeys * kSwizzleBytes;
  static constexpr int kQueryBytes = kQuerySlabs * kQuerySlab;
  static constexpr int kKeyBytes = kKeySlabs * kKeySlab;
  static constexpr int kValueBytes = kValueSlabs * kKeySlab;
  static constexpr int kConverterWarps = kIsConverted ? 4 : 0;
  static constexpr int kRawStages = !kIsConverted ? 0 : kTileDim == 256 ? 2 : 3;
  static constexpr int kRawRowBytes = 64 * KvFormat<kKvType>::kBits / 8;
  static constexpr int kRawSlab = kKeys * kRawRowBytes;
  static constexpr int kScaleOffset = kSlabs * kRawSlab;
  static constexpr int kRawBytes = kScaleOffset + (kHasTokenScales ? 4 * kKeys : 0);
  // Registers of a thread by its warpgroup's role, in units of 8: together no more than the kernel is launched with.
  static constexpr int kLoadRegisters = kThreads == 384 ? 24 : 32;
  static constexpr int kConvertRegisters = 64;
  static constexpr int kRegisters = kThreads == 384 ? 240 : kIsConverted ? 208 : 160;
  // Else raising them would wait for ever.
  static_assert(kLoadRegisters + (kIsConverted ? kConvertRegisters : 0) + kWarpgroups * kRegisters <=
                65536 / kThreads / 8 * 8 * (kThreads / 128));

  // Of a request's first query.
  __device__ __forceinline__ static int first_position(const Params&, const Work& work) {
    return work.seq_len - work.query_len;
  }
};

template <typename SHAPE>
struct PrefillMemory {
  static constexpr int kKeyOffset = SHAPE::kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + SHAPE::kStages * SHAPE::kKeyBytes;
  static constexpr int kRawOffset = kValueOffset + SHAPE::kStages * SHAPE::kValueBytes;
  static constexpr int kWorkOffset = kRawOffset + SHAPE::kRawStages * SHAPE::kRawBytes;
  static constexpr int kBarrierOffset = kWorkOffset + 2 * sizeof(Work);
  static_assert(sizeof(Work) % 4 == 0 && kBarrierOffset % 8 == 0);
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
  __device__ __forceinline__ uint32_t keys(int stage) const { return address + kKeyOffset + stage * SHAPE::kKeyBytes; }
  __device__ __forceinline__ uint32_t values(int stage) const {
    return address + kValueOffset + stage * SHAPE::kValueBytes;
  }
  __device__ __forceinline__ uint32_t raw(int stage) const { return address + kRawOffset + stage * SHAPE::kRawBytes; }
  __device__ __forceinline__ Work* work(int slot) const { return reinterpret_cast<Work*>(base + kWorkOffset) + slot; }
  __device__ __forceinline__ char* pointer(uint32_t to) const { return base + (to - address); }

  __device__ __forceinline__ uint32_t barrier(int index) const { return address + kBarrierOffset + 8 * index; }
  __device__ __forceinline__ uint32_t query_filled() const { return barrier(0); }
  __device__ __forceinline__ uint32_t query_emptied() const { return barrier(1); }
  __device__ __forceinline__ uint32_t work_filled(int slot) const { return barrier(2 + slot); }
  __device__ __forceinline__ uint32_t work_emptied(int slot) const { return barrier(4 + slot); }
  __device__ __forceinline__ uint32_t key_filled(int stage) const { return barrier(6 + stage); }
  __device__ __forceinline__ uint32_t key_emptied(int stage) const { return barrier(6 + SHAPE::kStages + stage); }
  __device__ __forceinline__ uint32_t value_filled(int stage) const { return barrier(6 + 2 * SHAPE::kStages + stage); }
  __device__ __forceinline__ uint32_t value_emptied(int stage) const { return barrier(6 + 3 * SHAPE::kStages + stage); }
  __device__ __forceinline__ uint32_t raw_filled(int stage) const { return barrier(kRawBarriers + stage); }
  __device__ __forceinline__ uint32_t raw_emptied(int stage) const {
    return barrier(kRawBarriers + SHAPE::kRawStages + stage);
  }

  // One thread. What copies fill completes with their bytes, the rest when each warp that reads or writes has arrived.
  __device__ __forceinline__ void init() const {
    constexpr int kReaders = 4 * SHAPE::kWarpgroups;
    init_barrier(query_filled(), 1);
    init_barrier(query_emptied(), kReaders);
    for (int slot = 0; slot < 2; ++slot) {
      init_barrier(work_filled(slot), 1);
      init_barrier(work_emptied(slot), kReaders + SHAPE::kConverterWarps);
    }
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(key_filled(stage), SHAPE::kIsConverted ? SHAPE::kConverterWarps : 1);
      init_barrier(value_filled(stage), SHAPE::kIsConverted ? SHAPE::kConverterWarps : 1);
      init_barrier(key_emptied(stage), kReaders);
      init_barrier(value_emptied(stage), kReaders);
    }
    for (int stage = 0; stage < SHAPE::kRawStages; ++stage) {
      init_barrier(raw_filled(stage), 1);
      init_barrier(raw_emptied(stage), SHAPE::kConverterWarps);
    }
    publish_barriers();
  }

  // The whole warp: work lies at a slot until it is given back.
  __device__ __forceinline__ void await(const PipelineState<2>& slot) const {
    wait_barrier(work_filled(slot.stage), slot.parity);
  }

  __device__ __forceinline__ void give_back(PipelineState<2>& slot) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(work_emptied(slot.stage));
    slot.advance();
  }

  __device__ __forceinline__ Work receive(PipelineState<2>& slot) const {
    await(slot);
    const Work received = *work(slot.stage);
    give_back(slot);
    return received;
  }
};

}  // namespace slipstream
