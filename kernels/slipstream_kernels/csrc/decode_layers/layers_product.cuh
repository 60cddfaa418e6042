// The consumer warps in the products of a layer: activations to operands, past the weights of the ring, and the end of a
// pass, where the warps' sums are added in a fixed order.
#pragma once

#include "decode_layers/layers_formats.cuh"

namespace slipstream {

constexpr int kMaxHeldFeatures = 4096;   // activations that stay in registers during a phase

template <typename FORMAT>
struct Consumer {
  using Shape = LayersShape<FORMAT>;
  const LayersParams& p;
  const LayersMemory<FORMAT>& memory;
  const KeyShare& keys;
  PipelineState<Shape::kSlots> pipe;
  uint32_t num_phases = 0;   // that this CTA has ended
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  static __device__ __forceinline__ void sync() { sync_threads(1, Shape::kConsumers); }

  // All CTAs have ended all phases before this one.
  __device__ __forceinline__ void await_phase() const {
    if (threadIdx.x == 0) await_count(p.counters, num_phases * p.num_ctas);
    sync();
  }

  __device__ __forceinline__ void end_phase() {
    sync();
    if (threadIdx.x == 0) count_up(p.counters);
    ++num_phases;
  }

  __device__ __forceinline__ void await_slot() const { wait_barrier(memory.full(pipe.stage), pipe.parity); }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (lane == 0) arrive(memory.empty(stage));
  }
};

// A phase's rows of activations, all of them in registers.
template <typename FORMAT>
struct HeldRows {
  static constexpr int kChunks = kMaxHeldFeatures / FORMAT::kChunk;
  typename FORMAT::Operands of[kChunks];
};

template <typename FORMAT>
__device__ __forceinline__ int first_feature(const Consumer<FORMAT>& c, int chunk) {
  return chunk * FORMAT::kChunk + c.warp * FORMAT::kSlice;
}

// A lane's activations of all chunks, before they are operands.
template <typename FORMAT>
struct RawRows {
  static constexpr int kChunks = HeldRows<FORMAT>::kChunks;
  Slice<FORMAT> of[kChunks];

  template <bool CAN_CHANGE>
  __device__ __forceinline__ void load(const Consumer<FORMAT>& c, const void* rows, int token, int features) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int first = first_feature(c, chunk);
      const bool exists = token < c.p.num_tokens && first < features;
      of[chunk].template load<CAN_CHANGE>(static_cast<const __nv_bfloat16*>(rows) + int64_t{token} * features + first, exists);
    }
  }

  __device__ __forceinline__ void arrange(HeldRows<FORMAT>& held) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) held.of[chunk].arrange(of[chunk]);
  }

  // rms_norm in place, with the rounding steps of ops.rms_norm. weight: the same features of the norm's weight.
  __device__ __forceinline__ void normalise(const Consumer<FORMAT>& c, const RawRows& weight, int features) {
    float sum = 0.0f;
    for_each([&](uint32_t& pair, uint32_t) {
      const float2 x = floats_of(pair);
      sum += x.x * x.x + x.y * x.y;
    }, weight);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    float* sums = c.memory.norms();   // [token][warp]; read before the phase ends, so nobody overwrites it early
    if (c.lane % 4 == 0) sums[c.lane / 4 * Consumer<FORMAT>::Shape::kWarps + c.warp] = sum;
    c.sync();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Consumer<FORMAT>::Shape::kWarps; ++warp) {
      total += sums[c.lane / 4 * Consumer<FORMAT>::Shape::kWarps + warp];
    }
    const float factor = rsqrtf(total / static_cast<float>(features) + c.p.eps);
    for_each([&](uint32_t& pair, uint32_t weights) {
      forget(pair);
      const float2 x = floats_of(pair), w = floats_of(weights);
      const float2 rounded = floats_of(pack<__nv_bfloat16>(x.x * factor, x.y * factor));
      pair = pack<__nv_bfloat16>(rounded.x * w.x, rounded.y * w.y);
    }, weight);
  }

 private:
  template <typename USE>
  __device__ __forceinline__ void for_each(USE use, const RawRows& other) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int v = 0; v < FORMAT::kVectors; ++v) {
#pragma unroll
        for (int w = 0; w < FORMAT::kVectorWords; ++w) use(of[chunk].of[v][w], other.of[chunk].of[v][w]);
      }
    }
  }
};

// What becomes of a product's rows.
struct Destination {
  __nv_bfloat16* out;   // row stride below
  int row_stride;
  bool is_residual;     // added to the residual stream, of which this CTA keeps its own columns
};

// A pass of a product: sums of all its tiles, as 16x8x16 products lay them out: rows l / 4 and + 8, tokens 2 (l % 4) + 0, 1.
template <typename FORMAT>
struct Pass {
  using Walk = ProductWalk<FORMAT>;
  using Memory = Consumer<FORMAT>;
  Memory& c;
  const Walk& walk;
  Range pass;
  int features;
  float sums[Walk::kTiles][4];
  float scale[FORMAT::kIsTiled ? 2 : 1][2];   // of the rows that this lane will write, on their way during the pass
  typename FORMAT::Weights coming;             // of the next tile: loaded from shared memory while one is multiplied
  int coming_tiles, first, second;             // how many the pass still has; slots of the next

  __device__ __forceinline__ Pass(Memory& consumer, const Walk& product, const Range& range, int in_features,
                                  const float* scales)
      : c(consumer), walk(product), pass(range), features(in_features) {
    coming_tiles = walk.num_tiles(pass) * num_chunks<FORMAT>(features);
    load_next();
#pragma unroll
    for (int tile = 0; tile < Walk::kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[tile][e] = 0.0f;
    }
    if constexpr (FORMAT::kIsScaled) {
#pragma unroll
      for (int i = 0; i < (FORMAT::kIsTiled ? 2 : 1); ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = unit(c.warp, half);
          const bool is_written = writes() && at < pass.end && (i == 0 || walk.is_gated);
          scale[i][half] = is_written ? __ldg(scales + walk.weight_row(at, c.warp + i, half, c.lane / 4)) : 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ int unit(int tile, int half) const { return walk.unit_of(pass, tile, half, c.lane / 4); }
  // Whether this warp writes a tile in the end (that of its number; a pair of weight tiles in one).
  __device__ __forceinline__ bool writes() const {
    return c.warp < walk.num_tiles(pass) && c.warp % walk.tiles_per_unit() == 0;
  }

  __device__ __forceinline__ void consume_chunk(int chunk, const typename FORMAT::Operands& x) {
    const int tiles = walk.num_tiles(pass);
    const bool has_slice = first_feature(c, chunk) < features;
#pragma unroll
    for (int tile = 0; tile < Walk::kTiles; ++tile) {
      if (tile < tiles) consume_tile(x, has_slice, sums[tile]);
    }
  }

  __device__ __forceinline__ void finish(const Destination& to) const {
    Memory::sync();   // what the pass before left is read
    float4* exchange = c.memory.exchange();
#pragma unroll
    for (int tile = 0; tile < Walk::kTiles; ++tile) {
      exchange[(tile * Memory::Shape::kWarps + c.warp) * 32 + c.lane] =
          make_float4(sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]);
    }
    Memory::sync();
    if (writes()) write(to);
  }

 private:
  __device__ __forceinline__ void load_next() {
    if (coming_tiles == 0) return;
    --coming_tiles;
    first = next_slot();
    if constexpr (FORMAT::kIsTiled) {
      const uint32_t slot = c.memory.slot(first), block = 2 * c.warp;
      coming.load(slot + block * FORMAT::kBlockBytes + c.lane * 8, 0,
                  slot + FORMAT::kWordOffset + block * FORMAT::kWordBytes + c.lane / 4 * 4);
    } else {
      second = next_slot();
      const uint32_t at = c.lane / 4 * FORMAT::kRowPitch + c.warp * 256 + c.lane % 4 * 16;
      coming.load(c.memory.slot(first) + at, c.memory.slot(second) + at, 0);
    }
  }

  __device__ __forceinline__ int next_slot() {
    const int stage = c.pipe.stage;
    c.await_slot();
    c.pipe.advance();
    return stage;
  }

  __device__ __forceinline__ void consume_tile(const typename FORMAT::Operands& x, bool has_slice, float (&tile_sums)[4]) {
    const typename FORMAT::Weights weights = coming;
    const int done[2] = {first, second};
    load_next();
    if (has_slice) FORMAT::multiply(weights, x, tile_sums);
    c.release(done[0]);
    if (!FORMAT::kIsTiled && c.lane == 0) arrive(c.memory.empty(done[1]));
  }

  __device__ __forceinline__ void add_warps(int tile, float (&values)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Memory::Shape::kWarps; ++warp) {
      const float4 part = c.memory.exchange()[(tile * Memory::Shape::kWarps + warp) * 32 + c.lane];
      values[0] += part.x, values[1] += part.y, values[2] += part.z, values[3] += part.w;
    }
  }

  __device__ __forceinline__ void scale_rows(int i, float (&values)[4]) const {
    if constexpr (FORMAT::kIsScaled) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] *= scale[i][e / 2];
    }
  }

  __device__ __forceinline__ void write(const Destination& to) const {
    float values[4];
    add_warps(c.warp, values);
    scale_rows(0, values);
    if (walk.is_gated) {
      if constexpr (FORMAT::kIsTiled) {
        float up[4];
        add_warps(c.warp + 1, up);
        scale_rows(1, up);
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e] = silu(values[e]) * up[e];
      } else {
        values[0] = silu(values[0]) * values[2], values[1] = silu(values[1]) * values[3];
      }
    }
    const int num_halves = walk.is_gated && !FORMAT::kIsTiled ? 1 : 2;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int half = e / 2, at = unit(c.warp, half), token = c.lane % 4 * 2 + e % 2;
      if (half < num_halves && at < pass.end && token < c.p.num_tokens) {
        store(to, Walk::out_column(at, half, c.lane / 4), token, values[e]);
      }
    }
  }

  __device__ __forceinline__ void store(const Destination& to, int column, int token, float value) const {
    __nv_bfloat16 rounded = from_float<__nv_bfloat16>(value);
    if (to.is_residual) {
      const int first = share_of_units(walk.num_units, blockIdx.x, c.p.num_ctas).begin * (FORMAT::kIsTiled ? 16 : 1);
      __nv_bfloat16& own = c.memory.own()[(column - first) * kMaxTokens + token];
      own = rounded = from_float<__nv_bfloat16>(to_float(own) + to_float(rounded));
    }
    to.out[int64_t{token} * to.row_stride + column] = rounded;
  }
};

template <typename FORMAT>
__device__ __forceinline__ void multiply_held(Consumer<FORMAT>& c, const HeldRows<FORMAT>& x, const ProductWalk<FORMAT>& walk,
                                              int features, const float* scales, const Destination& to) {
  const int chunks = num_chunks<FORMAT>(features);
  const Range share = share_of_units(walk.num_units, blockIdx.x, c.p.num_ctas);
#pragma unroll 1
  for (int begin = share.begin; begin < share.end; begin += walk.units_per_pass()) {
    Pass<FORMAT> pass(c, walk, walk.pass_at(begin, share), features, scales);
#pragma unroll
    for (int chunk = 0; chunk < HeldRows<FORMAT>::kChunks; ++chunk) {
      if (chunk < chunks) pass.consume_chunk(chunk, x.of[chunk]);
    }
    pass.finish(to);
  }
}

// Activations that do not fit in registers: a chunk ahead of its use, so that the latency of L2 passes meanwhile.
template <typename FORMAT>
__device__ __forceinline__ void multiply_streamed(Consumer<FORMAT>& c, const __nv_bfloat16* x,
                                                  const ProductWalk<FORMAT>& walk, int features, const float* scales,
                                                  const Destination& to) {
  const int chunks = num_chunks<FORMAT>(features), token = c.lane / 4;
  const Range share = share_of_units(walk.num_units, blockIdx.x, c.p.num_ctas);
  Slice<FORMAT> coming;
  const auto fetch = [&](int chunk) {
    const int first = first_feature(c, chunk);
    coming.template load<true>(x + int64_t{token} * features + first, token < c.p.num_tokens && first < features);
  };
  fetch(0);
#pragma unroll 1
  for (int begin = share.begin; begin < share.end; begin += walk.units_per_pass()) {
    Pass<FORMAT> pass(c, walk, walk.pass_at(begin, share), features, scales);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      typename FORMAT::Operands now;
      now.arrange(coming);
      fetch(chunk + 1 == chunks ? 0 : chunk + 1);
      pass.consume_chunk(chunk, now);
    }
    pass.finish(to);
  }
}

}  // namespace slipstream
