// The producer threads of the streaming W4A8 product: one brings codes and scales, and begins before the kernel before has
// ended; one brings tokens. A stage has one copy of each.
#pragma once

#include "pipeline/copy_pace.cuh"
#include "pipeline/late_producer.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedule/stream_int4_work.cuh"
#include "schedule/stream_w4a8_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct StreamW4A8Producer {
  static constexpr int kCodes = 0, kTokens = 1;   // producers, as a test numbers them

  const StreamW4A8Params& p;
  const StreamW4A8Maps& maps;
  const StreamW4A8Memory<SHAPE> memory;
  const StreamInt4Work<SHAPE> work;

  __device__ __forceinline__ void run_codes() const {
    const CopyPace pace(p.copy_pace, memory.empty(0));
    PipelineState<SHAPE::kStages> state;
    bool is_first_round = true;
    work.for_each_segment(p, [&](const StreamSegment& segment, const StreamTile& tile) {
#pragma unroll 1
      for (int chunk = segment.begin_chunk; chunk < segment.end_chunk; ++chunk, state.advance()) {
        wait_barrier(memory.empty(state.stage), state.parity ^ 1);   // passes at once in the first round
        delay_late_producer(kCodes);
        is_first_round = is_first_round && state.parity == 0;
        if (is_first_round) pace.wait(state.stage * SHAPE::kCodeBytes);
        copy_codes(state.stage, tile, chunk);
      }
    });
  }

  __device__ __forceinline__ void run_tokens() const {
    await_previous();
    PipelineState<SHAPE::kStages> state;
    work.for_each_segment(p, [&](const StreamSegment& segment, const StreamTile& tile) {
#pragma unroll 1
      for (int chunk = segment.begin_chunk; chunk < segment.end_chunk; ++chunk, state.advance()) {
        const uint32_t barrier = memory.full(state.stage);
        wait_barrier(memory.empty(state.stage), state.parity ^ 1);
        delay_late_producer(kTokens);
        arrive_expecting(barrier, SHAPE::kTokenBytes + SHAPE::kGroupsOfChunk * SHAPE::kSumBytes);
        copy_box(memory.tokens(state.stage), &maps.tokens, barrier, kReadOften, chunk * 128, tile.first_token);
        if constexpr (SHAPE::kIsExact) copy_sums(state.stage, tile, chunk);
      }
    });
  }

 private:
  // Sums of activations lie together for 128 tokens, among which are the tile's.
  __device__ __forceinline__ void copy_sums(int stage, const StreamTile& tile, int chunk) const {
    constexpr int kGroups = SHAPE::kGroupsOfChunk;
    const int64_t group = int64_t{tile.first_token / 128} * (p.in_features / 128) * kGroups + chunk * kGroups;
    copy_bulk(memory.activation_sums(stage), p.activation_sums + group * 128, kGroups * SHAPE::kSumBytes,
              memory.full(stage), kReadOften);
  }

  // What lies in the stage beyond the tile's units is multiplied, too, and not written.
  __device__ __forceinline__ void copy_codes(int stage, const StreamTile& tile, int chunk) const {
    constexpr uint32_t kUnitScales = SHAPE::kScaleBytes / SHAPE::kUnits;
    const uint64_t policy = p.token_tiles > 1 ? kReadNormally : kReadOnce;   // others read the same rows
    const uint32_t barrier = memory.full(stage), units = tile.end - tile.begin;
    const int64_t unit = int64_t{chunk} * p.num_units + tile.begin;
    const int64_t scaled = p.is_channelwise != 0 ? tile.begin : unit;
    arrive_expecting(barrier, units * (1024 + kUnitScales));
    copy_bulk(memory.codes(stage), static_cast<const char*>(p.qweight) + unit * 1024, units * 1024, barrier, policy);
    copy_bulk(memory.scales(stage), static_cast<const char*>(p.group_scales) + scaled * kUnitScales, units * kUnitScales,
              barrier, policy);
  }
};

}  // namespace slipstream
