// The producer threads of the streaming W4A16 product: one brings codes and scales, chunk by chunk, and begins before the
// kernel before has ended; one brings tokens, slab by slab.
#pragma once

#include "pipeline/late_producer.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/stream_int4_work.cuh"
#include "schedule/stream_w4a16_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct StreamW4A16Producer {
  static constexpr int kCodes = 0, kTokens = 1;   // producers, as a test numbers them

  const StreamW4A16Params& p;
  const StreamW4A16Maps& maps;
  const StreamW4A16Memory<SHAPE> memory;
  const StreamInt4Work<SHAPE> work;

  __device__ __forceinline__ void run_codes() const {
    const uint64_t policy = p.token_tiles > 1 ? kReadNormally : kReadOnce;   // others read the same rows
    PipelineState<SHAPE::kCodeStages> state;
    work.for_each_segment(p, [&](const StreamSegment& segment, const StreamTile& tile) {
#pragma unroll 1
      for (int chunk = segment.begin_chunk; chunk < segment.end_chunk; ++chunk, state.advance()) {
        wait_barrier(memory.code_empty(state.stage), state.parity ^ 1);   // passes at once in the first round
        delay_late_producer(kCodes);
        copy_chunk(state.stage, tile.begin, chunk, policy);
      }
    });
  }

  __device__ __forceinline__ void run_tokens() const {
    await_previous();
    PipelineState<SHAPE::kStages> state;
    work.for_each_segment(p, [&](const StreamSegment& segment, const StreamTile& tile) {
#pragma unroll 1
      for (int slab = SHAPE::kSlabs * segment.begin_chunk; slab < SHAPE::kSlabs * segment.end_chunk; ++slab, state.advance()) {
        const uint32_t barrier = memory.full(state.stage);
        wait_barrier(memory.empty(state.stage), state.parity ^ 1);
        delay_late_producer(kTokens);
        arrive_expecting(barrier, SHAPE::kTokenBytes);
        copy_box(memory.tokens(state.stage), &maps.tokens, barrier, kReadOften, slab * 64, tile.first_token);
      }
    });
  }

 private:
  // Codes of eight units, also beyond the tile's last; scales of those that there are.
  __device__ __forceinline__ void copy_chunk(int stage, int unit, int chunk, uint64_t policy) const {
    const uint32_t barrier = memory.code_full(stage), unit_bytes = SHAPE::kScaleBytes / SHAPE::kUnits;
    const uint32_t scale_bytes = min(SHAPE::kUnits, p.num_units - unit) * unit_bytes;
    const int64_t row = int64_t{p.is_channelwise != 0 ? 0 : chunk} * p.num_units + unit;
    arrive_expecting(barrier, SHAPE::kCodeBytes + scale_bytes);
    copy_box(memory.codes(stage), &maps.codes, barrier, policy, 0, chunk, unit);
    copy_bulk(memory.scales(stage), static_cast<const char*>(p.group_scales) + row * unit_bytes, scale_bytes, barrier,
              policy);
  }
};

}  // namespace slipstream
