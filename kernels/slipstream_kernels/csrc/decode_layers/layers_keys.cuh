// This step's keys and values: rotated, rounded to the cache's type, and stored both in the cache and in the slot of the
// ring that holds the tokens around them, by the CTA that attends to the last piece of their unit.
#pragma once

#include "decode_layers/layers_attend.cuh"

namespace slipstream {

// Eight bytes or four of one head's row, to the slot and to the cache.
template <int KV_BYTES>
__device__ __forceinline__ void store_four(const uint32_t (&pairs)[2], float scale, char* slot, char* cache) {
  if constexpr (KV_BYTES == 2) {
    const uint2 words = make_uint2(pairs[0], pairs[1]);
    *reinterpret_cast<uint2*>(slot) = words;
    if (cache != nullptr) *reinterpret_cast<uint2*>(cache) = words;
  } else {
    const float2 a = floats_of(pairs[0]), b = floats_of(pairs[1]);
    const uint32_t low = to_e4m3(a.x / scale, a.y / scale);
    const uint32_t word = low | static_cast<uint32_t>(to_e4m3(b.x / scale, b.y / scale)) << 16;
    *reinterpret_cast<uint32_t*>(slot) = word;
    if (cache != nullptr) *reinterpret_cast<uint32_t*>(cache) = word;
  }
}

// slot: of the piece that holds the unit's last token. Warp 0 stores the key, warp 1 the value; all consumers call it.
template <typename SHAPE, int KV_BYTES>
__device__ __forceinline__ void append_token(const LayersParams& p, const LayerTensors& tensors, const KeyUnit& unit,
                                             const float* angles, int first_token, char* slot) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp > 1) return;
  const int index = unit.seq_len - 1 - first_token, run = index / SHAPE::kRunTokens;
  char* to = slot + (warp == 0 ? 0 : SHAPE::Ring::kValueOffset) + run * SHAPE::Ring::kCopyPitch +
             index % SHAPE::kRunTokens * SHAPE::kRowBytes;
  const int64_t cache_slot = p.slot_mapping[unit.request];
  char* cache = nullptr;
  if (cache_slot >= 0) {
    const int64_t block = cache_slot >> p.block_size_log2, within = cache_slot & ((1 << p.block_size_log2) - 1);
    const int64_t row = ((block * p.num_kv_heads + unit.head) << p.block_size_log2) + within;
    cache = static_cast<char*>(warp == 0 ? tensors.key_cache : tensors.value_cache) + row * SHAPE::kRowBytes;
  }
  const float* scales = warp == 0 ? tensors.key_scale : tensors.value_scale;
  const float scale = KV_BYTES == 2 || scales == nullptr ? 1.0f : scales[unit.head];
  const auto* head = static_cast<const __nv_bfloat16*>(p.heads) + int64_t{unit.request} * p.qkv_size + p.q_size +
                     ((warp == 0 ? 0 : p.num_kv_heads) + unit.head) * kHeadDim;
  if (warp == 1) {
    const uint2 loaded = load_l2_8(head + 4 * lane);
    const uint32_t pairs[2] = {loaded.x, loaded.y};
    const int at = 4 * lane * KV_BYTES;
    store_four<KV_BYTES>(pairs, scale, to + at, cache == nullptr ? nullptr : cache + at);
  } else if (lane < 16) {
    uint32_t low[2], high[2];
    rotate(head, angles, 4 * lane, low, high);
    const int at = 4 * lane * KV_BYTES, beyond = at + 64 * KV_BYTES;
    store_four<KV_BYTES>(low, scale, to + at, cache == nullptr ? nullptr : cache + at);
    store_four<KV_BYTES>(high, scale, to + beyond, cache == nullptr ? nullptr : cache + beyond);
  }
  fence_shared_for_engines();   // a later copy into this slot comes after these writes
}

}  // namespace slipstream
