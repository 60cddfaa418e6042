// The consumer warpgroups of the streaming W4A8 product: 64 weight rows each times all tokens of a tile. A lane's codes become
// e4m3 operands in its registers, 64 summed columns while the products of those before are under way.
//
// kIsExact: operands are codes, exactly, and sums of a group leave the tensor cores for fp32 registers, where scale and zero
// point are applied, as in mixed_gemm_multiply.cuh. Else operands are (code - zero point) * scale by a table of a row
// (int4_table.cuh), and sums stay in the tensor cores to the end.
#pragma once

#include "formats/int4_converter.cuh"
#include "formats/int4_table.cuh"
#include "mma/hopper_mma.cuh"
#include "mma/stream_sums.cuh"
#include "mma/wgmma_fragments.cuh"
#include "schedule/stream_w4a8_shape.cuh"

namespace slipstream {

template <typename SHAPE>
struct StreamW4A8Consumer {
  static constexpr int kGroups = SHAPE::kGroupsOfChunk, kPhases = 2, kSteps = 2;   // of a chunk; of a phase
  using Sums = StreamSums<SHAPE>;

  // Scales and zero points of rows l / 4 and l / 4 + 8 for a group.
  struct RowScales {
    float scale[2], bias[2];

    RowScales() = default;
    __device__ __forceinline__ explicit RowScales(const uint32_t (&words)[2])
        : scale{scale_of(words[0]), scale_of(words[1])}, bias{scale_of(words[0] >> 16), scale_of(words[1] >> 16)} {}
  };

  const StreamW4A8Memory<SHAPE> memory;
  const int warpgroup;
  PipelineState<SHAPE::kStages> state = {};
  int unit = 4 * warpgroup + threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  uint4 codes;                    // of a phase: of rows l / 4 and l / 4 + 8 in turn
  uint32_t scales[2];             // packed, of these rows and a group
  uint4 tables[2];                // of these
  uint32_t a[kPhases][4 * kSteps];

  __device__ __forceinline__ void multiply(int num_chunks, Sums& sums) {
    if constexpr (SHAPE::kIsExact && kGroups == 1 && SHAPE::kHasTwoParts) {
      multiply_ahead(num_chunks, sums);
    } else if constexpr (SHAPE::kIsExact) {
      multiply_groups(num_chunks, sums);
    } else {
      multiply_all(num_chunks, sums);
    }
  }

 private:
  // A stage is given back when the products of the one after it are under way.
  __device__ __forceinline__ void multiply_all(int num_chunks, Sums& sums) {
    int before = state.stage;
    begin_chunk();
    expand(0);
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      const int stage = state.stage;
      start_products(stage, 0, chunk > 0, sums);
      load(stage, 1);
      wait_for_products<1>();
      if (chunk > 0) release(before);
      expand(1);
      start_products(stage, 1, true, sums);
      before = stage;
      state.advance();
      if (chunk + 1 == num_chunks) break;
      begin_chunk();
      wait_for_products<1>();
      expand(0);
    }
    wait_for_products<0>();
#pragma unroll
    for (auto& half : sums.of) pin(half);
    release(before);
  }

  // One set of parts: a group's sums are promoted while other warpgroups multiply.
  __device__ __forceinline__ void multiply_groups(int num_chunks, Sums& sums) {
    sums = {};
    begin_chunk();
    expand(0);
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      const int stage = state.stage;
      Sums parts;
      RowScales rows(scales);
      start_products(stage, 0, false, parts);
      load(stage, 1);
      if constexpr (kGroups == 2) {
        wait_for_products<0>();
        promote(rows, stage, 0, parts, sums);
        rows = RowScales(scales);
      }
      expand(1);
      start_products(stage, 1, kGroups == 1, parts);
      state.advance();
      if (chunk + 1 < num_chunks) {
        begin_chunk();
        if constexpr (kGroups == 1) wait_for_products<1>();
        expand(0);
      }
      wait_for_products<0>();
      promote(rows, stage, kGroups - 1, parts, sums);
      release(stage);
    }
  }

  // Two sets of parts: those of a chunk are promoted while the products of the next are under way.
  __device__ __forceinline__ void multiply_ahead(int num_chunks, Sums& sums) {
    sums = {};
    Sums parts[2];
    RowScales rows[2];
    begin_chunk();
    expand(0);
    int left = num_chunks, before = state.stage;
    // Multiplies a chunk to `parts[now]`, promotes the one before it.
    const auto step = [&](int now, bool is_first) {
      const int stage = state.stage;
      rows[now] = RowScales(scales);
      start_products(stage, 0, false, parts[now]);
      load(stage, 1);
      wait_for_products<1>();
      expand(1);
      start_products(stage, 1, true, parts[now]);
      if (!is_first) {
        wait_for_products<2>();
        promote(rows[1 - now], before, 0, parts[1 - now], sums);
        release(before);
      }
      before = stage;
      state.advance();
      if (--left == 0) return;
      begin_chunk();
      wait_for_products<1>();
      expand(0);
    };
    step(0, true);
#pragma unroll 1
    for (int pairs = (num_chunks - 1) / 2; pairs > 0; --pairs) step(1, false), step(0, false);
    if (num_chunks % 2 == 0) {
      step(1, false);
      wait_for_products<0>();
      promote(rows[1], before, 0, parts[1], sums);
    } else {
      wait_for_products<0>();
      promote(rows[0], before, 0, parts[0], sums);
    }
    release(before);
  }

  __device__ __forceinline__ void begin_chunk() {
    wait_barrier(memory.full(state.stage), state.parity);
    load(state.stage, 0);
  }

  // Takes a phase's codes, and its scales where a group begins.
  __device__ __forceinline__ void load(int stage, int phase) {
    codes = load_shared_16(memory.codes(stage) + unit * 1024 + 512 * phase + 16 * lane);
    if (phase > 0 && kGroups == 1) return;
    const uint32_t from = memory.scales(stage) + ((unit * 16 + lane / 4) * kGroups + phase) * 4;
    scales[0] = load_shared_4(from), scales[1] = load_shared_4(from + 8 * kGroups * 4);
    if constexpr (!SHAPE::kIsExact) tables[0] = table_of(scales[0]), tables[1] = table_of(scales[1]);
  }

  // Makes operands of a phase, which no product reads any more.
  __device__ __forceinline__ void expand(int phase) {
    asm volatile("" : "+r"(codes.x), "+r"(codes.y), "+r"(codes.z), "+r"(codes.w)::"memory");
    uint32_t(&to)[4 * kSteps] = a[phase];
    if constexpr (SHAPE::kIsExact) {
      split(codes.x, to[0], to[2]), split(codes.y, to[1], to[3]), split(codes.z, to[4], to[6]), split(codes.w, to[5], to[7]);
    } else {
      look_up_operands(codes.x, tables[0], to[0], to[2]), look_up_operands(codes.y, tables[1], to[1], to[3]);
      look_up_operands(codes.z, tables[0], to[4], to[6]), look_up_operands(codes.w, tables[1], to[5], to[7]);
    }
  }

  // A nibble in the low bits of e4m3 is code / 512, exactly.
  static __device__ __forceinline__ void split(uint32_t word, uint32_t& low, uint32_t& high) {
    low = word & 0x0F0F0F0Fu, high = word >> 4 & 0x0F0F0F0Fu;
  }

  __device__ __forceinline__ void start_products(int stage, int phase, bool adds, Sums& sums) const {
    const uint64_t tokens = rows_operand(memory.tokens(stage));
    if constexpr (SHAPE::kIsExact) pin(sums.of[0]);
    begin_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int half = 0; half < SHAPE::kHalves; ++half) {
        const uint64_t b = tokens + half * (SHAPE::kBlockColumns * 128 >> 4) + 2 * (kSteps * phase + i);
        multiply_fragment<__nv_fp8_e4m3, SHAPE::kBlockColumns>(sums.of[half], a[phase] + 4 * i, b, adds || i > 0);
      }
    }
    commit_products();
  }

  // sums += scale * (parts + bias * sums of activations), for rows l / 4 and l / 4 + 8; the products have ended.
  __device__ __forceinline__ void promote(const RowScales& rows, int stage, int group, Sums& parts, Sums& sums) const {
    pin(parts.of[0]);
    const uint32_t activation_sums = memory.activation_sums(stage) + group * SHAPE::kSumBytes + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < SHAPE::kBlockGroups; ++i) {
      const uint2 pair = load_shared_8(activation_sums + 32 * i);
      const float of_tokens[2] = {__uint_as_float(pair.x), __uint_as_float(pair.y)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float part = parts.of[0][4 * i + e] + rows.bias[e / 2] * of_tokens[e % 2];
        sums.of[0][4 * i + e] += rows.scale[e / 2] * part;
      }
    }
  }

  // By every warp, when its products have ended, and its lanes have read the sums of activations.
  __device__ __forceinline__ void release(int stage) const {
    if constexpr (SHAPE::kIsExact) __syncwarp();
    if (lane == 0) arrive(memory.empty(stage));
  }
};

}  // namespace slipstream
