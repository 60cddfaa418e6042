// The producer warps: bring the CTA's weights through the ring, slot by slot, each its rows of every slot.
#pragma once

#include "bulk_copy.cuh"
#include "hopper_copy.cuh"
#include "stream_shape.cuh"

namespace slipstream {

// Where the next slot's weights lie.
template <typename SHAPE>
struct SlotWalk {
  const StreamParams& p;
  UnitRange cta, pass;
  int chunk = 0, tile = 0;

  __device__ __forceinline__ explicit SlotWalk(const StreamParams& params) : p(params), cta(units_of_cta(params)) {
    pass = {cta.begin, min(cta.begin + SHAPE::kUnitsPerPass, cta.end)};
  }

  __device__ __forceinline__ bool is_done() const { return pass.begin >= cta.end; }

  __device__ __forceinline__ void advance() {
    if (++tile < tiles_of_pass<SHAPE>(pass)) return;
    tile = 0;
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

  __device__ __forceinline__ bool has_row(int row) const {
    return row < 16 && unit_of<SHAPE>(pass, tile, row) < pass.end;
  }

  __device__ __forceinline__ const char* address(int row) const {
    const int64_t weight = weight_row<SHAPE>(p, unit_of<SHAPE>(pass, tile, row), row);
    return static_cast<const char*>(p.weight) + weight * row_bytes() + int64_t{chunk} * SHAPE::kChunkBytes;
  }
};

// The row of every slot that this lane brings; a lane beyond the warp's share has none.
template <typename SHAPE>
__device__ __forceinline__ int row_of_lane() {
  constexpr int kRows = 16 / SHAPE::kProducers;
  const int lane = threadIdx.x % 32;
  return lane < kRows ? (threadIdx.x / 32 - SHAPE::kWarps) * kRows + lane : 16;
}

template <typename SHAPE>
__device__ __forceinline__ void prefetch_slots(SlotWalk<SHAPE> walk, int num_slots) {
  const int row = row_of_lane<SHAPE>();
  for (int i = 0; i < num_slots && !walk.is_done(); ++i, walk.advance()) {
    if (walk.has_row(row)) prefetch_bulk(walk.address(row), walk.chunk_bytes());
  }
}

// ring: shared address of the slots; barriers: of the `filled` ones, the `emptied` ones after them.
template <typename SHAPE>
__device__ __forceinline__ void produce(const StreamParams& p, uint32_t ring, uint32_t barriers) {
  const int row = row_of_lane<SHAPE>();
  const uint64_t policy = evict_first_policy();
  SlotWalk<SHAPE> walk(p);
  RingPlace<SHAPE::kSlots> place;
#pragma unroll 1
  for (int index = 0; !walk.is_done(); ++index, walk.advance(), place.advance()) {
    if (index == SHAPE::kSlots && p.prefetch_slots > 0) prefetch_slots(walk, p.prefetch_slots);
    const uint32_t filled = barriers + 8 * place.stage, emptied = filled + 8 * SHAPE::kSlots;
    const bool has_row = walk.has_row(row);
    const int num_rows = __popc(__ballot_sync(0xffffffff, has_row));
    const uint32_t bytes = walk.chunk_bytes();
    wait_barrier(emptied, place.parity ^ 1);
    if (threadIdx.x % 32 == 0) arrive_expecting(filled, bytes * num_rows);
    if (has_row) {
      copy_bulk(ring + place.stage * SHAPE::kSlotBytes + row * SHAPE::kRowPitch, walk.address(row), bytes, filled, policy);
    }
  }
}

}  // namespace slipstream
