// The producer warps: bring the CTA's weights through the ring, slot by slot in turn, a row per lane.
#pragma once

#include "bulk_copy.cuh"
#include "hopper_copy.cuh"
#include "stream_shape.cuh"

namespace slipstream {

// Where the next slot's weights lie. A slot is half a tile; halves without rows are skipped here as by the consumers.
template <typename SHAPE>
struct SlotWalk {
  const StreamParams& p;
  UnitRange cta, pass;
  int chunk = 0, slot = 0;   // slot: of the chunk

  __device__ __forceinline__ explicit SlotWalk(const StreamParams& params) : p(params), cta(units_of_cta(params)) {
    pass = {cta.begin, min(cta.begin + SHAPE::kUnitsPerPass, cta.end)};
  }

  __device__ __forceinline__ bool is_done() const { return pass.begin >= cta.end; }

  __device__ __forceinline__ void advance() {
    if (++slot < 2 * tiles_of_pass<SHAPE>(pass)) return;
    slot = 0;
    if (++chunk < num_chunks<SHAPE>(p)) return;
    chunk = 0;
    pass = {pass.end, min(pass.end + SHAPE::kUnitsPerPass, cta.end)};
  }

  __device__ __forceinline__ int64_t row_bytes() const {
    return int64_t{p.in_features} * 16 / SHAPE::Format::kElements;
  }

  __device__ __forceinline__ uint32_t chunk_bytes() const {
    return static_cast<uint32_t>(min(row_bytes() - int64_t{chunk} * SHAPE::kChunkBytes, int64_t{SHAPE::kChunkBytes}));
  }

  __device__ __forceinline__ int unit(int row) const { return unit_of<SHAPE>(pass, slot / 2, slot % 2, row); }

  // Of this slot; the sums of rows that do not exist are dropped.
  __device__ __forceinline__ int num_rows() const { return min(max(pass.end - unit(0), 0), 8); }

  __device__ __forceinline__ const char* address(int row) const {
    return static_cast<const char*>(p.weight) + weight_row<SHAPE>(p, unit(row), slot % 2) * row_bytes() +
           int64_t{chunk} * SHAPE::kChunkBytes;
  }
};

template <typename SHAPE>
__device__ __forceinline__ void prefetch_slots(SlotWalk<SHAPE> walk, int num_slots) {
  const int row = threadIdx.x % 32;
  for (int i = 0; i < num_slots && !walk.is_done(); ++i, walk.advance()) {
    if (row < walk.num_rows()) prefetch_bulk(walk.address(row), walk.chunk_bytes());
  }
}

// ring: shared address of the slots; barriers: of the `filled` ones, the `emptied` ones after them.
template <typename SHAPE>
__device__ __forceinline__ void produce(const StreamParams& p, uint32_t ring, uint32_t barriers) {
  const int row = threadIdx.x % 32, producer = threadIdx.x / 32 - SHAPE::kWarps;
  const uint64_t policy = evict_first_policy();
  SlotWalk<SHAPE> walk(p);
  RingPlace<SHAPE::kSlots> place;
#pragma unroll 1
  for (int index = 0; !walk.is_done(); ++index, walk.advance(), place.advance()) {
    if (index % SHAPE::kProducers != producer) continue;
    if (index == SHAPE::kSlots && p.prefetch_slots > 0) prefetch_slots(walk, p.prefetch_slots);
    const uint32_t filled = barriers + 8 * place.stage, emptied = filled + 8 * SHAPE::kSlots;
    const int num_rows = walk.num_rows();
    const uint32_t bytes = walk.chunk_bytes();
    wait_barrier(emptied, place.parity ^ 1);
    if (row == 0) arrive_expecting(filled, bytes * num_rows);
    if (row < num_rows) {
      copy_bulk(ring + place.stage * SHAPE::kSlotBytes + row * SHAPE::kRowPitch, walk.address(row), bytes, filled, policy);
    }
  }
}

}  // namespace slipstream
