// Shared memory of the kernel of all layers. One ring of slots serves all phases: weights of products and keys and values
// pass through it in the order of their use, so that copies go on while consumers wait for other CTAs.
#pragma once

#include "decode_layers/layers_device.cuh"
#include "decode_layers/layers_walk.cuh"

namespace slipstream {

constexpr int kHeadDim = 128;
constexpr int kMaxTokens = 8;
constexpr int kMaxLayers = 40;
constexpr int kMaxOwnRows = 128;   // of the residual stream, that one CTA adds to

template <typename FORMAT>
struct LayersShape {
  static constexpr int kWarps = 8;       // consumers
  static constexpr int kProducers = 4;   // each brings every fourth slot
  // Of a thread, after producers have left theirs to consumers.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kConsumers = 32 * kWarps, kThreads = 32 * (kWarps + kProducers);

  // 16 KB of keys and values: 8 copies of 2 KB; 32 bytes between them put what a quarter of a warp reads into other banks.
  static constexpr int kCopyBytes = 2048, kCopyPitch = kCopyBytes + 32, kValueOffset = 4 * kCopyPitch;
  static constexpr int kSlotBytes =
      FORMAT::kSlotBytes > 8 * kCopyPitch ? FORMAT::kSlotBytes : 8 * kCopyPitch;

  static constexpr int kExchangeBytes = 16384;   // warps' sums of 4 tiles; outputs of 4 tiles of keys
  static constexpr int kStateBytes = 4 * 8 * 8, kNormBytes = kWarps * kMaxTokens * 4;
  static constexpr int kOwnBytes = kMaxOwnRows * kMaxTokens * 2;
  static constexpr int kTableBytes = kMaxLayers * static_cast<int>(sizeof(LayerTensors));
  static constexpr int kAngleBytes = kMaxTokens * kHeadDim * 4;   // cosines and sines of each token's position
  static constexpr int kFixedBytes = kExchangeBytes + kStateBytes + kNormBytes + kOwnBytes + kTableBytes +
                                     kAngleBytes + 16;
  static constexpr int kSlots = (232448 - kFixedBytes) / (kSlotBytes + 16);
  static constexpr int kExchangeOffset = kSlots * kSlotBytes;
  static constexpr int kStateOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kNormOffset = kStateOffset + kStateBytes;
  static constexpr int kOwnOffset = kNormOffset + kNormBytes;
  static constexpr int kTableOffset = kOwnOffset + kOwnBytes;
  static constexpr int kAngleOffset = kTableOffset + kTableBytes;
  static constexpr int kFlagOffset = kAngleOffset + kAngleBytes;
  static constexpr int kBarrierOffset = kFlagOffset + 16;
  static constexpr int kTotalBytes = kBarrierOffset + 16 * kSlots;
  static_assert(kTotalBytes <= 232448 && kSlotBytes % 16 == 0);
};

// What all roles of a CTA share.
template <typename FORMAT>
struct LayersMemory {
  using Shape = LayersShape<FORMAT>;
  char* base;

  __device__ __forceinline__ uint32_t slot(int stage) const { return shared_address(base) + stage * Shape::kSlotBytes; }
  __device__ __forceinline__ char* slot_bytes(int stage) const { return base + stage * Shape::kSlotBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return shared_address(base) + Shape::kBarrierOffset + 16 * stage;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ float4* exchange() const { return reinterpret_cast<float4*>(base + Shape::kExchangeOffset); }
  __device__ __forceinline__ float2* states() const { return reinterpret_cast<float2*>(base + Shape::kStateOffset); }
  __device__ __forceinline__ float* norms() const { return reinterpret_cast<float*>(base + Shape::kNormOffset); }
  __device__ __forceinline__ __nv_bfloat16* own() const {
    return reinterpret_cast<__nv_bfloat16*>(base + Shape::kOwnOffset);
  }
  __device__ __forceinline__ LayerTensors* table() const {
    return reinterpret_cast<LayerTensors*>(base + Shape::kTableOffset);
  }
  // [kMaxTokens, 128]: 64 cosines, then 64 sines.
  __device__ __forceinline__ float* angles() const { return reinterpret_cast<float*>(base + Shape::kAngleOffset); }
  __device__ __forceinline__ volatile int* flag() const {
    return reinterpret_cast<volatile int*>(base + Shape::kFlagOffset);
  }
};

}  // namespace slipstream
