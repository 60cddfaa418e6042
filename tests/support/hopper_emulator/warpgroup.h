// Warpgroup products (wgmma) of the emulator. A product is done at a random time between the moment when all 128 threads
// have asked for it and the one when a thread waits for it: operands that are overwritten too early, or read before they
// are there, show.
#pragma once

#include <deque>
#include <map>

#include "mma/warp_mma.cuh"

namespace emulator {

// d[64 x n] (+)= a[64 x 16] b[n x 16]^T of 16-bit elements.
struct Product {
  float* d[128];
  uint32_t a[128][4];
  const float* values;     // of the 65536 patterns of an element
  uint64_t a_operand, b_operand;
  int n;
  bool has_fragments, is_slab, is_columns, adds;   // is_slab: a [16 x 64], its rows summed over
  int num_threads = 0;
};

// Byte address of an element, under the 128-byte swizzle.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
inline uint32_t address_of(uint64_t operand) { return (operand & 0x3FFF) << 4; }
inline uint32_t stride_of(uint64_t operand, int bit) { return (operand >> bit & 0x3FFF) << 4; }

inline float element(const float* values, uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, shared(swizzled(address)), 2);
  return values[bits];
}

inline void execute(const Product& product) {
  static float a[64][16], b[16][256];
  const uint32_t from_a = address_of(product.a_operand), from_b = address_of(product.b_operand);
  const uint32_t unit = stride_of(product.b_operand, 32), slab = stride_of(product.b_operand, 16);
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      const int thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2, part = row % 16 / 8 + k / 8 * 2;
      a[row][k] = product.has_fragments
                      ? product.values[product.a[thread][part] >> 16 * (k % 2) & 0xffff]
                      : element(product.values, from_a + (product.is_slab ? k / 8 * stride_of(product.a_operand, 32) + k % 8 * 128 + row * 2
                                                                          : row / 8 * stride_of(product.a_operand, 32) + row % 8 * 128 + k * 2));
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < product.n; ++n) {
      const uint32_t offset = product.is_columns ? n / 64 * slab + k / 8 * unit + k % 8 * 128 + n % 64 * 2
                                                 : n / 8 * unit + n % 8 * 128 + k * 2;
      b[k][n] = element(product.values, from_b + offset);
    }
  }
  for (int row = 0; row < 64; ++row) {
    float sums[256] = {};
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < product.n; ++n) sums[n] += a[row][k] * b[k][n];
    }
    for (int n = 0; n < product.n; ++n) {
      const int thread = row / 16 * 32 + row % 8 * 4 + n % 8 / 2, i = n / 8 * 4 + row % 16 / 8 * 2 + n % 2;
      float& d = product.d[thread][i];
      d = product.adds ? d + sums[n] : sums[n];
    }
  }
}

// The queue of a warpgroup; each of its threads asks for the same products in the same order.
struct Warpgroup {
  std::deque<Product> queue;
  unsigned num_done = 0;              // products; the queue has those after
  unsigned asked[128] = {};           // products of each thread
  std::vector<unsigned> groups[128];  // how many products each thread had asked for at its commits

  void advance() {
    execute(queue.front());
    queue.pop_front();
    ++num_done;
    ++progress;
  }
  void commit() { groups[current->thread.x % 128].push_back(asked[current->thread.x % 128]); }
  void wait(int pending) {
    const auto& mine = groups[current->thread.x % 128];
    if (static_cast<int>(mine.size()) <= pending) return;
    const unsigned wanted = mine[mine.size() - 1 - pending];
    while (num_done < wanted) {
      until([&] { return num_done >= wanted || queue.front().num_threads == 128; });
      if (num_done < wanted) advance();
    }
  }
};

// Of all CTAs; to be cleared before each run.
inline std::map<std::pair<Cta*, int>, Warpgroup>& warpgroups() {
  static std::map<std::pair<Cta*, int>, Warpgroup> all;
  return all;
}

inline Warpgroup& warpgroup() { return warpgroups()[{current->cta, static_cast<int>(current->thread.x / 128)}]; }

template <typename T, int N>
void multiply(float (&d)[N / 2], const uint32_t* a, uint64_t a_operand, uint64_t b_operand, bool is_columns, int adds,
              bool is_slab = false) {
  const int thread = current->thread.x % 128;
  Warpgroup& group = warpgroup();
  const unsigned index = group.asked[thread]++;
  while (group.queue.size() <= index - group.num_done) group.queue.emplace_back();
  Product& product = group.queue[index - group.num_done];
  product.d[thread] = d;
  if (a != nullptr) std::memcpy(product.a[thread], a, 16);
  product.values = slipstream::table_of_values<T>();
  product.a_operand = a_operand, product.b_operand = b_operand;
  product.n = N, product.has_fragments = a != nullptr, product.is_columns = is_columns, product.adds = adds != 0;
  product.is_slab = is_slab;
  if (++product.num_threads == 128 && group.queue.size() == index - group.num_done + 1 && std::rand() % 3 == 0) {
    while (group.num_done <= index) group.advance();
  }
}

}  // namespace emulator
