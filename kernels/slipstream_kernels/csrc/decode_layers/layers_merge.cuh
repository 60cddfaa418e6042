// From the warps' partial outputs to the rows of `attended`: over the warps of a CTA, then, for a unit that several CTAs
// share, by the last of them to arrive. Weights follow the log-sum-exp (Flash-Decoding); the order of sums is fixed.
#pragma once

#include "decode_layers/layers_keys.cuh"

namespace slipstream {

// A weighted sum of parts with maxima of their own.
struct Blend {
  float maximum = kNoMaximum, normaliser = 0.0f;
  float2 sum = {0.0f, 0.0f};

  __device__ __forceinline__ void add(float2 state, float2 part) {
    const float weight = exp2_fast(state.x - maximum);
    normaliser += weight * state.y;
    sum.x += weight * part.x, sum.y += weight * part.y;
  }
};

template <typename FORMAT, int KV_BYTES>
struct AttentionMerge {
  using Shape = AttentionShape<FORMAT, KV_BYTES>;
  Consumer<FORMAT>& c;
  const LayerTensors& tensors;
  int tile, part;   // of this warp

  // All consumers.
  __device__ __forceinline__ void write(const WarpState<Shape>& state, const KeyUnit& unit, const UnitParts& parts) const {
    c.sync();   // what the unit before left is read
    share(state);
    c.sync();
    const int slot = parts.slot_of(blockIdx.x);
#pragma unroll 1
    for (int item = threadIdx.x; item < c.p.group * (kHeadDim / 2); item += Shape::Ring::kConsumers) {
      blend_tiles(unit, parts, slot, item / (kHeadDim / 2), item % (kHeadDim / 2) * 2);
    }
    if (parts.count > 1) finish_shared(unit, parts);
  }

 private:
  __device__ __forceinline__ float* outputs() const { return reinterpret_cast<float*>(c.memory.exchange()); }

  __device__ __forceinline__ void share(const WarpState<Shape>& state) const {
    const int i = c.lane / 4, j = c.lane % 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = state.normaliser[e];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      const int row = 2 * j + e;
      if (part == 0 && i == 0) c.memory.states()[tile * 8 + row] = make_float2(state.maximum[e], sum);
#pragma unroll
      for (int product = 0; product < Shape::kProducts; ++product) {
        const int dim = kHeadDim / Shape::kParts * part + 2 * Shape::kProducts * i + 2 * product;
        *reinterpret_cast<float2*>(outputs() + (tile * 8 + row) * kHeadDim + dim) =
            make_float2(state.out[product][e], state.out[product][e + 2]);
      }
    }
  }

  __device__ __forceinline__ void blend_tiles(const KeyUnit& unit, const UnitParts& parts, int slot, int row, int dim) const {
    Blend blend;
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) blend.maximum = fmaxf(blend.maximum, c.memory.states()[t * 8 + row].x);
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      blend.add(c.memory.states()[t * 8 + row], *reinterpret_cast<const float2*>(outputs() + (t * 8 + row) * kHeadDim + dim));
    }
    if (parts.count == 1) return store(unit, row, dim, blend);
    const int64_t part_row = int64_t{slot} * 8 + row;
    __stcg(reinterpret_cast<float2*>(c.p.partial_out + part_row * kHeadDim + dim), blend.sum);
    if (dim == 0) {
      __stcg(reinterpret_cast<float2*>(c.p.partial_state) + part_row, make_float2(blend.maximum, blend.normaliser));
    }
  }

  __device__ __forceinline__ void store(const KeyUnit& unit, int row, int dim, const Blend& blend) const {
    float factor = blend.normaliser == 0.0f ? 0.0f : 1.0f / blend.normaliser;
    if (KV_BYTES == 1 && tensors.value_scale != nullptr) factor *= tensors.value_scale[unit.head];
    auto* out = static_cast<__nv_bfloat16*>(c.p.attended) + int64_t{unit.request} * c.p.q_size +
                (unit.head * c.p.group + row) * kHeadDim + dim;
    *reinterpret_cast<uint32_t*>(out) = pack<__nv_bfloat16>(blend.sum.x * factor, blend.sum.y * factor);
  }

  // The last CTA to arrive merges all parts, and leaves the counter at zero for the next layer.
  __device__ __forceinline__ void finish_shared(const KeyUnit& unit, const UnitParts& parts) const {
    c.sync();
    if (threadIdx.x == 0) {
      int32_t* arrivals = c.p.arrivals + unit.index(c.p.num_kv_heads);
      fence_device();
      const bool is_last = atomicAdd(arrivals, 1) == parts.count - 1;
      if (is_last) *arrivals = 0;
      *c.memory.flag() = is_last;
      fence_device();
    }
    c.sync();
    if (*c.memory.flag() == 0) return;
#pragma unroll 1
    for (int item = threadIdx.x; item < c.p.group * (kHeadDim / 2); item += Shape::Ring::kConsumers) {
      blend_parts(unit, parts, item / (kHeadDim / 2), item % (kHeadDim / 2) * 2);
    }
  }

  // Many parts on their way at once: one by one, their latency was a third of a small batch's attention.
  __device__ __forceinline__ void blend_parts(const KeyUnit& unit, const UnitParts& parts, int row, int dim) const {
    constexpr int kBatch = 8;
    Blend blend;
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kBatch) {
      float2 states[kBatch], outputs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        states[i] = make_float2(kNoMaximum, 0.0f), outputs[i] = make_float2(0.0f, 0.0f);
        if (first + i >= parts.count) continue;
        const int64_t part_row = int64_t{parts.slot_of(parts.first_cta + first + i)} * 8 + row;
        states[i] = __ldcg(reinterpret_cast<const float2*>(c.p.partial_state) + part_row);
        outputs[i] = __ldcg(reinterpret_cast<const float2*>(c.p.partial_out + part_row * kHeadDim + dim));
      }
      float highest = blend.maximum;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) highest = fmaxf(highest, states[i].x);
      const float rescale = exp2_fast(blend.maximum - highest);
      blend.maximum = highest, blend.normaliser *= rescale, blend.sum.x *= rescale, blend.sum.y *= rescale;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) blend.add(states[i], outputs[i]);
    }
    store(unit, row, dim, blend);
  }
};

// The attention phase of one layer, by the consumers of a CTA.
template <typename FORMAT, int KV_BYTES>
__device__ __forceinline__ void attend_keys(Consumer<FORMAT>& c, const LayerTensors& tensors) {
  using Shape = AttentionShape<FORMAT, KV_BYTES>;
  const LayersParams& p = c.p;
  const Range mine = c.keys.pieces;
  const int tile = c.warp / Shape::kParts, part = c.warp % Shape::kParts;
  KeyUnit unit = c.keys.first;
  c.await_phase();
#pragma unroll 1
  for (int piece = mine.begin; piece < mine.end;) {
    if (piece > mine.begin) unit = unit_of_piece<Shape::kPieceTokens>(p, piece);
    const int end = least(mine.end, unit.start + unit.num_pieces);
    const float* angles = c.memory.angles() + unit.request * kHeadDim;
    Queries<Shape> queries;
    queries.load(p, unit, angles);
    float scale = p.scale * kLog2E;
    if (KV_BYTES == 1 && tensors.key_scale != nullptr) scale *= tensors.key_scale[unit.head];
    WarpState<Shape> state;
    state.clear();
#pragma unroll 1
    for (; piece < end; ++piece) {
      const int first = (piece - unit.start) * Shape::kPieceTokens, stage = c.pipe.stage;
      c.await_slot();
      c.pipe.advance();
      if (first + Shape::kPieceTokens >= unit.seq_len && unit.seq_len > 0) {
        append_token<Shape, KV_BYTES>(p, tensors, unit, angles, first, c.memory.slot_bytes(stage));
        c.sync();
      }
      const KeyTile<Shape, KV_BYTES> keys{c.memory.slot(stage), tile, part, unit.seq_len - first};
      keys.attend(queries, scale, state);
      c.release(stage);
    }
    AttentionMerge<FORMAT, KV_BYTES>{c, tensors, tile, part}.write(state, unit, UnitParts(unit, c.keys.size));
  }
  c.end_phase();
}

}  // namespace slipstream
