// The emulator's int4_converter.cuh: what of it the emulated kernels use, by the numbers that it stands for.
#pragma once

#include "formats/numbers.cuh"

namespace slipstream {

inline uint32_t masked_or(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) | bits; }

inline float scale_of(uint32_t word) {
  const auto bits = static_cast<uint16_t>(word);
  return __half2float(*reinterpret_cast<const __half*>(&bits));
}

// Pairs of nibbles i and i + 4, each (q - zero point) * scale, scale and product rounded.
template <typename T>
struct ScaledInt4Converter {
  float zero, scale;

  explicit ScaledInt4Converter(uint32_t word) : zero(word >> 16), scale(to_float(from_float<T>(scale_of(word)))) {}

  void expand(uint32_t word, uint32_t (&pairs)[4]) const {
    for (int i = 0; i < 4; ++i) {
      const float low = word >> 4 * i & 15, high = word >> 4 * (i + 4) & 15;
      pairs[i] = pack<T>((low - zero) * scale, (high - zero) * scale);
    }
  }
};

}  // namespace slipstream
