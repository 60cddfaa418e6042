// Counter-based noise and the order of logits: sample/triton/sample_search.py and token_groups.py in CUDA C++.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace slipstream {

constexpr uint32_t kMinusInfinityKey = 0x007FFFFF;
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLowestLogit = -3.4028234663852886e38f;

__device__ __forceinline__ float logit(float x) { return x; }
__device__ __forceinline__ float logit(__half x) { return __half2float(x); }
__device__ __forceinline__ float logit(__nv_bfloat16 x) { return __bfloat162float(x); }

// fp32 to uint32 so that the order is kept; -0 equals 0.
__device__ __forceinline__ uint32_t ordered(float x) {
  const int bits = __float_as_int(x + 0.0f);
  return static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t key) {
  const int bits = static_cast<int>(key ^ 0x80000000u);
  return __int_as_float(bits ^ ((bits >> 31) & 0x7FFFFFFF));
}

// lowbias32, see sample/reference/sample.py.
__device__ __forceinline__ uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Exp(1) noise of (seed, position, token id) over exp(z): the least has Gumbel-max's winner.
struct Race {
  uint32_t first_key, second_key;

  __device__ __forceinline__ Race(int64_t seed, int64_t position) {
    const auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    first_key = mix(mix(mix(low) ^ high) ^ static_cast<uint32_t>(position));
    second_key = mix(mix(mix(high ^ 0x5851F42Du) ^ low) ^ static_cast<uint32_t>(position));
  }

  __device__ __forceinline__ float score(float z, int id) const {
    const uint32_t bits = mix(mix(static_cast<uint32_t>(id) * 0x9E3779B9u + first_key) ^ second_key) & 0x7FFFFFFFu;
    const float u = fminf((static_cast<float>(static_cast<int>(bits)) + 0.5f) * 4.656612873077393e-10f, 0.99999994f);
    // -log(1 - u); 1 - u loses the digits of a small u, and small ones are the winners: a series there.
    const float tail = 0.33333333f + u * (0.25f + u * (0.2f + u * 0.16666667f));
    const float noise = u < 0.0625f ? u * (1.0f + u * (0.5f + u * tail)) : __log2f(1.0f - u) * -0.6931471805599453f;
    return noise * exp2f(z * -1.4426950408889634f);
  }
};

// A score >= 0 and an id, so that the least has the lowest id among equal scores.
__device__ __forceinline__ uint64_t runner(float score, int id) {
  return static_cast<uint64_t>(__float_as_uint(score)) << 32 | static_cast<uint32_t>(id);
}

constexpr uint64_t kNoRunner = uint64_t{0x7F800000} << 32 | 0x7FFFFFFF;

}  // namespace slipstream
