// The loading warp of a CTA: asks for tiles of queries, tells the multiplying warpgroups of them, and streams queries,
// keys and values into shared memory by tensor copies, as far ahead as the rings allow.
//
// Shared memory holds slabs of 64 columns (128 swizzled bytes) by all rows of a tile. Keys and values past the end of
// a sequence become zero: whole blocks by copies from outside of the cache, the rest by the warpgroups.
#pragma once

#include "hopper_copy.cuh"
#include "hopper_mma.cuh"
#include "prefill_work.cuh"
#include "warp_mma.cuh"

namespace slipstream {

// SLIPSTREAM_* choices as a type. KEYS: of one tile. WARPGROUPS: that multiply, 64 rows each.
template <typename T, int HEAD_DIM, int KEYS, int WARPGROUPS, bool HAS_SOFT_CAP, bool HAS_ALIBI>
struct PrefillShape {
  using Element = T;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kWarpgroups = WARPGROUPS;
  static constexpr bool kHasSoftCap = HAS_SOFT_CAP;
  static constexpr bool kHasAlibi = HAS_ALIBI;
  static constexpr int kThreads = 128 * (WARPGROUPS + 1);
  static constexpr int kRows = 64 * WARPGROUPS;
  static constexpr int kKeys = KEYS;
  static constexpr int kSlabs = HEAD_DIM / 64;
  static constexpr int kStages = 2;
  static constexpr int kQuerySlab = kRows * kSwizzleBytes;
  static constexpr int kKeySlab = kKeys * kSwizzleBytes;
  static constexpr int kQueryBytes = kSlabs * kQuerySlab;
  static constexpr int kStageBytes = kSlabs * kKeySlab;
  // 65536 registers, in units of 8 a thread; the loading warpgroup needs few.
  static constexpr int kLoadRegisters = WARPGROUPS == 2 ? 24 : 32;
  static constexpr int kRegisters = WARPGROUPS == 2 ? 240 : 160;
};

template <typename SHAPE>
struct PrefillMemory {
  static constexpr int kKeyOffset = SHAPE::kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + SHAPE::kStages * SHAPE::kStageBytes;
  static constexpr int kWorkOffset = kValueOffset + SHAPE::kStages * SHAPE::kStageBytes;
  static constexpr int kBarrierOffset = kWorkOffset + 2 * sizeof(Work);
  static constexpr int kNumBarriers = 2 + 4 * SHAPE::kStages + 4;
  static constexpr int kBytes = kBarrierOffset + 8 * kNumBarriers;
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
  __device__ __forceinline__ Work* work(int slot) const { return reinterpret_cast<Work*>(base + kWorkOffset) + slot; }

  __device__ __forceinline__ uint32_t barrier(int index) const { return address + kBarrierOffset + 8 * index; }
  __device__ __forceinline__ uint32_t query_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t query_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t work_full(int slot) const { return barrier(2 + slot); }
  __device__ __forceinline__ uint32_t work_empty(int slot) const { return barrier(4 + slot); }
  __device__ __forceinline__ uint32_t key_full(int stage) const { return barrier(6 + stage); }
  __device__ __forceinline__ uint32_t key_empty(int stage) const { return barrier(6 + SHAPE::kStages + stage); }
  __device__ __forceinline__ uint32_t value_full(int stage) const { return barrier(6 + 2 * SHAPE::kStages + stage); }
  __device__ __forceinline__ uint32_t value_empty(int stage) const { return barrier(6 + 3 * SHAPE::kStages + stage); }

  // One thread. A full barrier completes with its bytes, an empty one when each warp that reads has arrived.
  __device__ __forceinline__ void init() const {
    constexpr int kReaders = 4 * SHAPE::kWarpgroups;
    init_barrier(query_full(), 1);
    init_barrier(query_empty(), kReaders);
    for (int slot = 0; slot < 2; ++slot) {
      init_barrier(work_full(slot), 1);
      init_barrier(work_empty(slot), kReaders);
    }
    for (int stage = 0; stage < SHAPE::kStages; ++stage) {
      init_barrier(key_full(stage), 1);
      init_barrier(value_full(stage), 1);
      init_barrier(key_empty(stage), kReaders);
      init_barrier(value_empty(stage), kReaders);
    }
    publish_barriers();
  }
};

// The maps of one launch: queries [tokens][heads][dims], keys and values [blocks x kv heads][block_size][dims]
// (blocks cut into parts of at most 64 rows).
struct PrefillMaps {
  CUtensorMap q;
  CUtensorMap keys;
  CUtensorMap values;
};

constexpr int kMaxPartRowsLog2 = 6;

template <typename SHAPE>
struct PrefillLoader {
  const PrefillParams& p;
  const PrefillMaps& maps;
  PrefillMemory<SHAPE> memory;
  RingPlace<SHAPE::kStages> key_place, value_place;
  RingPlace<2> slot;
  RingPlace<1> query_place;

  // Runs until no work is left; one warp.
  __device__ __forceinline__ void run() {
    const WorkList<SHAPE::kRows, SHAPE::kKeys> list(p);
    Work work;
    int index = blockIdx.x;
    while (index < list.size()) {
      if (list.find(index, work)) {
        announce(work);
        if (work.begin_tile < work.end_tile) load(work);
      }
      index = list.take();
    }
    list.leave();
    work.head = -1;
    announce(work);
  }

 private:
  __device__ __forceinline__ void announce(const Work& work) {
    wait_barrier(memory.work_empty(slot.stage), slot.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      *memory.work(slot.stage) = work;
      arrive(memory.work_full(slot.stage));
    }
    slot.advance();
  }

  __device__ __forceinline__ void load(const Work& work) {
    int place = find_place(work, work.end_tile - 1);
    load_queries(work);
    load_keys(place);
    int next = find_place(work, work.end_tile - 2);
    for (int tile = work.end_tile - 2; tile >= work.begin_tile; --tile) {
      const int after = find_place(work, tile - 1);
      load_keys(next);
      load_values(place);
      place = next, next = after;
    }
    load_values(place);
  }

  __device__ __forceinline__ void load_queries(const Work& work) {
    wait_barrier(memory.query_empty(), query_place.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      arrive_expecting(memory.query_full(), SHAPE::kQueryBytes);
      const int token = work.start + (work.first_row >> p.pack_log2);
      for (int slab = 0; slab < SHAPE::kSlabs; ++slab) {
        copy_box(memory.queries() + slab * SHAPE::kQuerySlab, &maps.q, memory.query_full(), 64 * slab,
                 work.head << p.pack_log2, token);
      }
    }
    __syncwarp();
    query_place.advance();
  }

  // Rows of one block, or part of a large one: each lane copies one slab of one such chunk.
  __device__ __forceinline__ int chunk_rows_log2() const { return min(p.block_size_log2, kMaxPartRowsLog2); }
  __device__ __forceinline__ int num_chunks() const { return SHAPE::kKeys >> chunk_rows_log2(); }

  // Of this lane's chunk: the block and kv head as one index of the maps (a block of more than 64 rows counts as
  // several), negative past the end of the sequence.
  __device__ __forceinline__ int find_place(const Work& work, int tile) const {
    const int chunk = threadIdx.x % 32 % num_chunks();
    const int key = tile * SHAPE::kKeys + (chunk << chunk_rows_log2());
    if (tile < work.begin_tile || key >= work.seq_len) return -1;
    const int block = p.block_tables[work.request * p.table_stride + (key >> p.block_size_log2)];
    const int kv_head = (work.head << p.pack_log2) / (p.num_q_heads / p.num_kv_heads);
    const int parts_log2 = p.block_size_log2 - chunk_rows_log2();
    const int part = (key & ((1 << p.block_size_log2) - 1)) >> chunk_rows_log2();
    return block < 0 ? -1 : ((block * p.num_kv_heads + kv_head) << parts_log2) + part;
  }

  __device__ __forceinline__ void load_keys(int place) {
    copy(&maps.keys, place, memory.keys(key_place.stage), memory.key_full(key_place.stage),
         memory.key_empty(key_place.stage), key_place.parity);
    key_place.advance();
  }

  __device__ __forceinline__ void load_values(int place) {
    copy(&maps.values, place, memory.values(value_place.stage), memory.value_full(value_place.stage),
         memory.value_empty(value_place.stage), value_place.parity);
    value_place.advance();
  }

  __device__ __forceinline__ void copy(const CUtensorMap* map, int place, uint32_t to, uint32_t full, uint32_t empty,
                                       uint32_t parity) const {
    const int lane = threadIdx.x % 32, chunk = lane % num_chunks(), slab = lane / num_chunks();
    wait_barrier(empty, parity ^ 1);
    if (lane == 0) arrive_expecting(full, SHAPE::kStageBytes);
    __syncwarp();
    if (slab < SHAPE::kSlabs) {
      const int chunk_bytes = kSwizzleBytes << chunk_rows_log2();
      copy_box(to + slab * SHAPE::kKeySlab + chunk * chunk_bytes, map, full, 64 * slab, 0, place);
    }
    __syncwarp();
  }
};

}  // namespace slipstream
