// The emulator's hopper_copy.cuh: memory barriers, named barriers, tensor copies of three dimensions, a place in a ring.
#pragma once

#include "emulator.h"

// Rows of 16-bit elements, and the box that one copy takes of them: 64 columns, under the 128-byte swizzle.
struct CUtensorMap {
  const char* data;
  int64_t num_rows, row_bytes;   // bytes from row to row; those of the tensor are the first `width`
  int box_rows;
  int64_t width = row_bytes;
  int element_bytes = 2, box_bytes = 128;
  bool is_swizzled = true;   // over as many bytes as a box has of a row
  int box_slabs = 1;   // of three dimensions: boxes of rows that follow each other, each `box_bytes` further in its rows
  int64_t num_planes = 1, plane_bytes = 0;   // of three dimensions without slabs: bytes from plane to plane
  int box_planes = 1;
};

namespace slipstream {

inline void init_barrier(uint32_t barrier, int arrivals) {
  const auto count = static_cast<uint8_t>(arrivals);
  emulator::memory_barrier(barrier) = {count, count, 0, 0, 0};
}
inline void publish_barriers() {}

inline void arrive(uint32_t address) {
  auto& barrier = emulator::memory_barrier(address);
  if (barrier.pending == 0) emulator::fail("an arrival too many");
  --barrier.pending;
  emulator::settle(barrier);
}

inline void arrive_expecting(uint32_t address, int bytes) {
  emulator::memory_barrier(address).bytes += bytes;
  arrive(address);
}

inline void wait_barrier(uint32_t address, uint32_t parity) {
  const auto& barrier = emulator::memory_barrier(address);
  emulator::until([&] { return barrier.phase != parity; });
}

// What is there before is lost at once, as it may be: who still reads it will see NaN.
inline void copy_bytes(uint32_t to, const void* from, uint32_t barrier, int bytes) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes <= 0 || bytes % 16 != 0) {
    emulator::fail("a copy that is not of whole 16 bytes");
  }
  std::memset(emulator::shared(to), 0xff, bytes);
  emulator::current->cta->copies.push_back(
      {emulator::shared(to), static_cast<const char*>(from), static_cast<uint32_t>(bytes), barrier});
}

// What lies outside of the tensor is zero.
inline void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  static const char zeros[16] = {};
  const int num_rows = map->box_planes * map->box_rows;
  if (to % (map->is_swizzled ? 1024 : 128) != 0 || x * map->element_bytes % 16 != 0) emulator::fail("a box that is not aligned");
  std::memset(emulator::shared(to), 0xff, num_rows * map->box_bytes);
  for (int row = 0; row < num_rows; ++row) {
    const int64_t line = y + row % map->box_rows, plane = z + row / map->box_rows;
    for (int part = 0; part < map->box_bytes / 16; ++part) {
      const int64_t column = map->element_bytes * x + 16 * part;
      const bool is_inside = line >= 0 && line < map->num_rows && plane >= 0 && plane < map->num_planes && column < map->width;
      const char* from = is_inside ? map->data + plane * map->plane_bytes + line * map->row_bytes + column : zeros;
      const int eighth = row * map->box_bytes / 128 % 8;   // of a swizzled unit
      const int place = map->is_swizzled ? part ^ eighth % (map->box_bytes / 16) : part;
      emulator::current->cta->copies.push_back({emulator::shared(to + row * map->box_bytes + place * 16), from, 16, barrier});
    }
  }
}

inline void fence_shared_for_engines() {}
template <int REGISTERS>
void raise_registers() {}
template <int REGISTERS>
void lower_registers() {}

inline void sync_threads(int id, int num_threads) { emulator::sync(id, num_threads); }

inline void arrive_threads(int id, int num_threads) { emulator::arrive_at(id, num_threads); }

template <int STAGES>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

}  // namespace slipstream
