// The loading warp of a CTA: asks for tiles of queries, tells the other warps of them, and streams queries, keys and
// values into shared memory by tensor copies, as far ahead as the rings allow.
//
// Keys and values past the end of a sequence become zero: whole blocks by copies from outside of the cache, the rest by
// those who read them.
#pragma once

#include "schedule/prefill_shape.cuh"

namespace slipstream {

constexpr int kMaxPartRowsLog2 = 6;

template <typename SHAPE>
struct PrefillLoader {
  const typename SHAPE::Params& p;
  const typename SHAPE::Maps& maps;
  PrefillMemory<SHAPE> memory;
  PipelineState<SHAPE::kStages> key_place, value_place;
  PipelineState<SHAPE::kRawStages> raw_place;
  PipelineState<2> slot;
  PipelineState<1> query_place;

  // Runs until no work is left; one warp. Work is found where the other warps read it: 24 registers would not hold it.
  __device__ __forceinline__ void run() {
    const WorkList<SHAPE::kRows, SHAPE::kKeys> list(p);
    int index = blockIdx.x;
    while (index < list.size) {
      Work& work = next_work();
      if (list.find(index, work)) {
        if constexpr (SHAPE::kIsRagged) SHAPE::widen(p, work);
        announce();
        if (work.begin_tile < work.end_tile) load(work);
      }
      index = list.take();
    }
    list.leave();
    next_work().head = -1;
    announce();
  }

 private:
  // The next slot, once the warps that read it have given it back.
  __device__ __forceinline__ Work& next_work() const {
    wait_barrier(memory.work_emptied(slot.stage), slot.parity ^ 1);
    return *memory.work(slot.stage);
  }

  __device__ __forceinline__ void announce() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(memory.work_filled(slot.stage));
    slot.advance();
  }

  __device__ __forceinline__ void load(const Work& work) {
    int place = find_place<SHAPE::kHasStagedKeys>(work, work.end_tile - 1);
    load_queries(work);
    load_keys(work, place);
    int next = find_place<SHAPE::kHasStagedKeys>(work, work.end_tile - 2);
    for (int tile = work.end_tile - 2; tile >= work.begin_tile; --tile) {
      const int after = find_place<SHAPE::kHasStagedKeys>(work, tile - 1);
      load_keys(work, next);
      load_values(work, value_place_of(work, tile + 1, place));
      place = next, next = after;
    }
    load_values(work, value_place_of(work, work.begin_tile, place));
  }

  __device__ __forceinline__ void load_queries(const Work& work) {
    wait_barrier(memory.query_emptied(), query_place.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      arrive_expecting(memory.query_filled(), SHAPE::kQueryBytes);
      const int token = work.start + (work.first_row >> p.pack_log2);
      for (int slab = 0; slab < SHAPE::kQuerySlabs; ++slab) {
        copy_box(memory.queries() + slab * SHAPE::kQuerySlab, &maps.q, memory.query_filled(), 64 * slab,
                 work.head << p.pack_log2, token);
      }
    }
    __syncwarp();
    query_place.advance();
  }

  // Rows of one block, or part of a large one: each lane copies one slab of one such chunk.
  template <bool IS_STAGED>
  __device__ __forceinline__ int chunk_rows_log2() const {
    return IS_STAGED ? kStagedRowsLog2 : min(p.block_size_log2, kMaxPartRowsLog2);
  }

  // Values lie where the keys of the tile lie in their tensor, unless they alone are staged.
  __device__ __forceinline__ int value_place_of(const Work& work, int tile, int key_place) const {
    if constexpr (SHAPE::kHasStagedKeys == SHAPE::kHasStagedValues) return key_place;
    return find_place<SHAPE::kHasStagedValues>(work, tile);
  }

  // Block and kv head of this lane's chunk as one index of the maps (a block of more than 64 rows counts as
  // several), negative past the end of the sequence.
  // Ragged keys lie in rows, of which this is a tile's first.
  template <bool IS_STAGED>
  __device__ __forceinline__ int find_place(const Work& work, int tile) const {
    if constexpr (SHAPE::kIsRagged) return p.key_start_loc[work.request] + tile * SHAPE::kKeys;
    const int rows_log2 = chunk_rows_log2<IS_STAGED>();
    const int chunk = threadIdx.x % 32 % (SHAPE::kKeys >> rows_log2);
    const int key = tile * SHAPE::kKeys + (chunk << rows_log2);
    if (tile < work.begin_tile || key >= work.seq_len) return -1;
    const int kv_head = (work.head << p.pack_log2) / (p.num_q_heads / p.num_kv_heads);
    if (IS_STAGED) {
      return (work.request * p.staged_blocks + (key >> kStagedRowsLog2)) * p.num_kv_heads + kv_head;
    }
    const int block = p.block_tables[work.request * p.table_stride + (key >> p.block_size_log2)];
    const int parts_log2 = p.block_size_log2 - rows_log2;
    const int part = (key & ((1 << p.block_size_log2) - 1)) >> rows_log2;
    return block < 0 ? -1 : ((block * p.num_kv_heads + kv_head) << parts_log2) + part;
  }

  __device__ __forceinline__ void load_keys(const Work& work, int place) {
    if constexpr (SHAPE::kIsConverted) {
      load_raw(&maps.keys, p.key_scale, place);
    } else {
      const Buffer to{memory.keys(key_place.stage), memory.key_filled(key_place.stage),
                      memory.key_emptied(key_place.stage), key_place.parity};
      if constexpr (SHAPE::kIsRagged) copy_rows<SHAPE::kKeySlabs, SHAPE::kOwnKeySlabs>(&maps.keys, work.head, place, to);
      else copy<SHAPE::kKeySlabs, kSwizzleBytes, SHAPE::kHasStagedKeys>(&maps.keys, nullptr, place, to);
      key_place.advance();
    }
  }

  __device__ __forceinline__ void load_values(const Work& work, int place) {
    if constexpr (SHAPE::kIsConverted) {
      load_raw(&maps.values, p.value_scale, place);
    } else {
      const Buffer to{memory.values(value_place.stage), memory.value_filled(value_place.stage),
                      memory.value_emptied(value_place.stage), value_place.parity};
      if constexpr (SHAPE::kIsRagged) copy_rows<SHAPE::kSlabs, SHAPE::kSlabs>(&maps.values, work.head, place, to);
      else copy<SHAPE::kValueSlabs, kSwizzleBytes, SHAPE::kHasStagedValues>(&maps.values, nullptr, place, to);
      value_place.advance();
    }
  }

  __device__ __forceinline__ void load_raw(const CUtensorMap* map, const float* scales, int place) {
    const Buffer to{memory.raw(raw_place.stage), memory.raw_filled(raw_place.stage),
                    memory.raw_emptied(raw_place.stage), raw_place.parity};
    copy<SHAPE::kSlabs, SHAPE::kRawRowBytes, false>(map, scales, place, to);
    raw_place.advance();
  }

  // A stage of a ring, the barriers of both its states, and the parity of its current pass.
  struct Buffer {
    uint32_t address, filled, emptied, parity;
  };

  template <int SLABS, int ROW_BYTES, bool IS_STAGED>
  __device__ __forceinline__ void copy(const CUtensorMap* map, const float* scales, int place, const Buffer& to) const {
    constexpr int kSlab = SHAPE::kKeys * ROW_BYTES;
    constexpr int kRowElements = SHAPE::kIsConverted ? ROW_BYTES : SLABS < SHAPE::kSlabs ? kSwizzleBytes : 64;
    const int rows_log2 = chunk_rows_log2<IS_STAGED>(), num_chunks = SHAPE::kKeys >> rows_log2;
    const int lane = threadIdx.x % 32, chunk = lane % num_chunks, slab = lane / num_chunks;
    wait_barrier(to.emptied, to.parity ^ 1);
    if (lane == 0) arrive_expecting(to.filled, SHAPE::kIsConverted ? SHAPE::kRawBytes : SLABS * kSlab);
    __syncwarp();
    if (slab < SLABS) {
      const int chunk_bytes = ROW_BYTES << rows_log2;
      copy_box(to.address + slab * kSlab + chunk * chunk_bytes, map, to.filled, kRowElements * slab, 0, place);
    }
    if (SHAPE::kHasTokenScales && slab == 0) {
      // Any scales will do past the end of the sequence, where they are not used.
      const int64_t first = static_cast<int64_t>(max(place, 0)) << rows_log2;
      const int bytes = sizeof(float) << rows_log2;
      copy_bytes(to.address + SHAPE::kScaleOffset + chunk * bytes, scales + first, to.filled, bytes);
    }
    __syncwarp();
  }

  // Rows of one head that follow each other, a slab by each lane; the last slabs are of the part of keys that heads share.
  template <int SLABS, int OWN_SLABS>
  __device__ __forceinline__ void copy_rows(const CUtensorMap* map, int head, int row, const Buffer& to) const {
    const int slab = threadIdx.x % 32;
    wait_barrier(to.emptied, to.parity ^ 1);
    if (slab == 0) arrive_expecting(to.filled, SLABS * SHAPE::kKeySlab);
    __syncwarp();
    const uint32_t place = to.address + slab * SHAPE::kKeySlab;
    if (slab < OWN_SLABS) copy_box(place, map, to.filled, 64 * slab, head, row);
    else if (slab < SLABS) copy_box(place, &maps.shared_keys, to.filled, 64 * (slab - OWN_SLABS), 0, row);
    __syncwarp();
  }
};

}  // namespace slipstream
