// The emulator's memory_access.cuh: addresses and loads of shared memory, loads of global memory.
#pragma once

#include "emulator.h"

namespace slipstream {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulator::current->cta->shared.data());
}

inline char* shared_bytes(uint32_t address, size_t size) {
  if (address + size > emulator::current->cta->shared.size()) emulator::fail("an access outside of shared memory");
  return emulator::shared(address);
}

template <typename T>
T load_shared(uint32_t address) {
  T value;
  std::memcpy(&value, shared_bytes(address, sizeof(T)), sizeof(T));
  return value;
}
inline uint32_t load_shared_4(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint2 load_shared_8(uint32_t address) { return load_shared<uint2>(address); }
inline uint4 load_shared_16(uint32_t address) { return load_shared<uint4>(address); }

inline void store_shared_2(uint32_t address, uint32_t v) { std::memcpy(shared_bytes(address, 2), &v, 2); }
inline void store_shared_4(uint32_t address, uint32_t v) { std::memcpy(shared_bytes(address, 4), &v, 4); }
inline void store_shared_4(uint32_t address, float v) { std::memcpy(shared_bytes(address, 4), &v, 4); }
inline void store_shared_8(uint32_t address, float x, float y) {
  store_shared_4(address, x);
  store_shared_4(address + 4, y);
}
inline void store_shared_16(uint32_t address, float x, float y, float z, float w) {
  store_shared_8(address, x, y);
  store_shared_8(address + 8, z, w);
}

inline uint4 load_global_16(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) emulator::fail("a load of 16 bytes that are not aligned");
  return *static_cast<const uint4*>(from);
}
inline uint2 load_global_8(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 8 != 0) emulator::fail("a load of 8 bytes that are not aligned");
  return *static_cast<const uint2*>(from);
}
inline void store_global_8(void* to, uint32_t x, uint32_t y) {
  if (reinterpret_cast<uintptr_t>(to) % 8 != 0) emulator::fail("a store of 8 bytes that are not aligned");
  const uint32_t words[2] = {x, y};
  std::memcpy(to, words, 8);
}
inline uint4 load_once_16(const void* from) { return load_global_16(from); }

}  // namespace slipstream
