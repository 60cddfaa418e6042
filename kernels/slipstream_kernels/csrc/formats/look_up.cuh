// 4-bit indices into a table of 16 bytes in four registers.  Device code only; no framework header.
#pragma once

#include <cstdint>

namespace slipstream {

// Eight 4-bit values of a word -> eight entries, four in a register. As one piece of assembly: written with __byte_perm the
// compiler masks selectors that need no mask, which costs a quarter of the loop.
__device__ __forceinline__ void look_up(uint32_t word, uint4 const& table, uint32_t& low, uint32_t& high) {
  const uint32_t index = word & 0x77777777u;
  const uint32_t choice = ((word & 0x88888888u) | 0x64206420u) >> 1;   // the upper half where a value's high bit is set
  asm("{\n .reg .b32 a, b, i, c;\n"
      " prmt.b32 a, %4, %5, %2;\n prmt.b32 b, %6, %7, %2;\n prmt.b32 %0, a, b, %3;\n"
      " shr.u32 i, %2, 16;\n shr.u32 c, %3, 16;\n"
      " prmt.b32 a, %4, %5, i;\n prmt.b32 b, %6, %7, i;\n prmt.b32 %1, a, b, c;\n}\n"
      : "=&r"(low), "=&r"(high)
      : "r"(index), "r"(choice), "r"(table.x), "r"(table.y), "r"(table.z), "r"(table.w));
}

}  // namespace slipstream
