// The emulator's cluster.cuh: tensor copies of two dimensions, the other CTAs of a cluster.
#pragma once

#include "ptx/hopper_copy.cuh"

namespace slipstream {

constexpr uint64_t kReadOnce = 0, kReadNormally = 0, kReadOften = 0;

inline void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t, int x, int y) {
  static const char zeros[16] = {};
  if (to % 1024 != 0 || x * map->element_bytes % 16 != 0) emulator::fail("a box that is not aligned");
  std::memset(emulator::shared(to), 0xff, map->box_rows * map->box_bytes);
  for (int row = 0; row < map->box_rows; ++row) {
    for (int part = 0; part < map->box_bytes / 16; ++part) {
      const int64_t column = map->element_bytes * x + 16 * part;
      const bool is_inside = y + row >= 0 && y + row < map->num_rows && column < map->width;
      const char* from = is_inside ? map->data + (y + row) * map->row_bytes + column : zeros;
      char* place = emulator::shared(to + row * map->box_bytes + (map->is_swizzled ? part ^ row % 8 : part) * 16);
      emulator::current->cta->copies.push_back({place, from, 16, barrier});
    }
  }
}

inline void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int x, int y, int z) {
  for (int slab = 0; slab < map->box_slabs; ++slab) {
    const int column = x + (z + slab) * map->box_bytes / map->element_bytes;
    copy_box(to + slab * map->box_rows * map->box_bytes, map, barrier, hint, column, y);
  }
}

// Of four dimensions: not emulated.
inline void copy_box(uint32_t, const CUtensorMap*, uint32_t, uint64_t, int, int, int, int) { emulator::fail("four dimensions"); }

inline void arrive_in_cluster() { emulator::arrive_in_cluster(); }
inline void wait_for_cluster() { emulator::wait_for_cluster(); }
inline uint32_t address_in(uint32_t address, int rank) { return address | rank << emulator::kRankBit; }
inline float4 load_from_cluster(uint32_t remote) {
  float4 value;
  std::memcpy(&value, emulator::shared_in_cluster(remote), sizeof(value));
  return value;
}

}  // namespace slipstream
