// One CTA's way through a step: its producers bring, its consumers go from phase to phase.
#pragma once

#include "decode_layers/layers_few.cuh"
#include "decode_layers/layers_merge.cuh"
#include "decode_layers/layers_produce.cuh"

namespace slipstream {

template <typename FORMAT, int KV_BYTES>
struct LayerConsumer {
  Consumer<FORMAT>& c;
  const LayersParams& p = c.p;

  __device__ __forceinline__ void run(int layer) {
    const LayerTensors& tensors = c.memory.table()[layer];
    const __nv_bfloat16* residual = bf16(layer == 0 ? const_cast<void*>(p.embedded) : p.residual);
#pragma unroll 1
    for (int product = kQkv; product <= kGateUp; ++product) {   // one copy of the code
      if (product == kOut) attend_keys<FORMAT, KV_BYTES>(c, tensors);
      HeldRows<FORMAT> held;
      if (product == kGateUp) residual = bf16(p.residual);
      load_rows(tensors, product == kOut ? bf16(p.attended) : residual, product, held);
      multiply_held(c, held, ProductWalk<FORMAT>(out_features(p, product), product == kGateUp), in_features(p, product),
                    tensors.scale[product], destination(product));
      c.end_phase();
    }
    c.await_phase();
    multiply_streamed(c, bf16(p.activated), ProductWalk<FORMAT>(p.hidden_size, false), p.intermediate_size,
                      tensors.scale[kDown], destination(kDown));
    c.end_phase();
  }

 private:
  static __device__ __forceinline__ __nv_bfloat16* bf16(void* rows) { return static_cast<__nv_bfloat16*>(rows); }

  __device__ __forceinline__ Destination destination(int product) const {
    if (product == kQkv) return {bf16(p.heads), p.qkv_size, false};
    if (product == kGateUp) return {bf16(p.activated), p.intermediate_size, false};
    return {bf16(p.residual), p.hidden_size, true};
  }

  // A phase's rows, those of qkv and gate_up normalised; the norm's weight comes to L2 while the CTA waits for others
  // (not to registers: there is no room for what is not used yet).
  __device__ __forceinline__ void load_rows(const LayerTensors& tensors, const __nv_bfloat16* rows, int product,
                                            HeldRows<FORMAT>& held) {
    const void* norm = product == kOut ? nullptr : tensors.norm[product == kQkv ? 0 : 1];
    if (norm != nullptr && threadIdx.x * 64 < in_features(p, product)) {
      prefetch_line(static_cast<const __nv_bfloat16*>(norm) + threadIdx.x * 64);
    }
    c.await_phase();
    if (p.num_tokens <= kFewTokens) load_few_rows(rows, norm, in_features(p, product), held);
    else load_many_rows(rows, norm, in_features(p, product), held);
  }

  __device__ __forceinline__ void load_few_rows(const __nv_bfloat16* rows, const void* norm, int features,
                                                HeldRows<FORMAT>& held) {
    FewRows<FORMAT> x;
    typename FewRows<FORMAT>::Vectors weight;
    x.load(c, rows, features);
    if (norm != nullptr) FewRows<FORMAT>::load_norm(c, norm, features, weight);
    if (norm != nullptr) x.normalise(c, weight, features);
    x.arrange(c, held);
  }

  __device__ __forceinline__ void load_many_rows(const __nv_bfloat16* rows, const void* norm, int features,
                                                 HeldRows<FORMAT>& held) {
    RawRows<FORMAT> x, weight;
    x.template load<true>(c, rows, c.lane / 4, features);
    if (norm != nullptr) weight.template load<false>(c, norm, 0, features);
    if (norm != nullptr) x.normalise(c, weight, features);
    x.arrange(held);
  }
};

// The rows of the residual stream that this CTA adds to: its share of o's and down's outputs, the same of both.
template <typename FORMAT>
__device__ __forceinline__ void load_own_rows(const LayersParams& p, const LayersMemory<FORMAT>& memory) {
  constexpr int kRows = FORMAT::kIsTiled ? 16 : 1;
  const Range share = share_of_units(p.hidden_size / kRows, blockIdx.x, p.num_ctas);
  const auto* embedded = static_cast<const __nv_bfloat16*>(p.embedded);
#pragma unroll 1
  for (int item = threadIdx.x; item < share.size() * kRows * p.num_tokens; item += LayersShape<FORMAT>::kThreads) {
    const int row = item / p.num_tokens, token = item % p.num_tokens;
    memory.own()[row * kMaxTokens + token] = embedded[int64_t{token} * p.hidden_size + share.begin * kRows + row];
  }
}

template <typename FORMAT>
__device__ __forceinline__ void begin_step(const LayersParams& p, const LayersMemory<FORMAT>& memory) {
  using Shape = LayersShape<FORMAT>;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int stage = 0; stage < Shape::kSlots; ++stage) {
      init_barrier(memory.full(stage), 1);
      init_barrier(memory.empty(stage), Shape::kWarps);
    }
    publish_barriers();
  }
  const auto* from = reinterpret_cast<const uint64_t*>(p.layers);
  auto* to = reinterpret_cast<uint64_t*>(memory.table());
  const int words = p.num_layers * static_cast<int>(sizeof(LayerTensors) / sizeof(uint64_t));
#pragma unroll 1
  for (int word = threadIdx.x; word < words; word += Shape::kThreads) to[word] = from[word];
  load_own_rows(p, memory);
#pragma unroll 1
  for (int item = threadIdx.x; item < p.num_tokens * kHeadDim; item += Shape::kThreads) {
    memory.angles()[item] = p.cos_sin[p.positions[item / kHeadDim] * kHeadDim + item % kHeadDim];
  }
  __syncthreads();
}

// The last CTA leaves the counters at zero for the next launch.
__device__ __forceinline__ void end_step(const LayersParams& p) {
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(p.counters + 1, 1u) != static_cast<uint32_t>(p.num_ctas) - 1) return;
  p.counters[0] = 0;
  p.counters[1] = 0;
}


template <typename FORMAT, int KV_BYTES>
__device__ __forceinline__ void run_step(const LayersParams& p, const LayersMemory<FORMAT>& memory) {
  begin_step(p, memory);
  using Shape = LayersShape<FORMAT>;
  if (threadIdx.x >= Shape::kConsumers) {
    lower_registers<Shape::kProducerRegisters>();
    Producer<FORMAT, KV_BYTES>{p, memory}.produce_all();
  } else {
    raise_registers<Shape::kConsumerRegisters>();
    const KeyShare keys = KeyShare::of_cta<AttentionShape<FORMAT, KV_BYTES>::kPieceTokens>(p, blockIdx.x);
    Consumer<FORMAT> consumer{p, memory, keys};
#pragma unroll 1
    for (int layer = 0; layer < p.num_layers; ++layer) LayerConsumer<FORMAT, KV_BYTES>{consumer}.run(layer);
    end_step(p);
  }
}

}  // namespace slipstream
