// Warpgroup products (wgmma) of the emulator. A product is done at a random time between the moment when all 128 threads
// have asked for it and the one when a thread waits for it: operands that are overwritten too early, or read before they
// are there, show.
#pragma once

#include <deque>
#include <map>

#include "mma/warp_mma.cuh"

namespace emulator {

// d[64 x n] (+)= a[64 x k] b[n x k]^T: 16 elements of 16 bits, or 32 of 8.
struct Product {
  float* d[128];
  uint32_t a[128][4];
  const float* values;     // of the patterns of an element
  int element_bytes;
  uint64_t a_operand, b_operand;
  int n;
  bool has_fragments, is_slab, is_columns, adds;   // is_slab: a [16 x 64], its rows summed over
  int num_threads = 0;
};

// Bytes of a row under the operand's swizzle: 128, or 64.
inline uint32_t row_bytes_of(uint64_t operand) { return operand >> 62 == 2 ? 64 : 128; }
// Byte address of an element, under that swizzle.
inline uint32_t swizzled(uint32_t address, uint32_t row_bytes) { return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4; }
inline uint32_t address_of(uint64_t operand) { return (operand & 0x3FFF) << 4; }
inline uint32_t stride_of(uint64_t operand, int bit) { return (operand >> bit & 0x3FFF) << 4; }

inline float element(const Product& product, uint32_t address, uint32_t row_bytes = 128) {
  uint16_t bits = 0;
  std::memcpy(&bits, shared(swizzled(address, row_bytes)), product.element_bytes);
  return product.values[bits];
}

// Element (row, k) of the operand in registers.
inline float fragment(const Product& product, int row, int k) {
  const int in_word = 4 / product.element_bytes, bits = 8 * product.element_bytes, half = 4 * in_word;   // k of a register
  const int thread = row / 16 * 32 + row % 8 * 4 + k % half / in_word, part = row % 16 / 8 + k / half * 2;
  return product.values[product.a[thread][part] >> bits * (k % in_word) & ((1u << bits) - 1)];
}

inline void execute(const Product& product) {
  static float a[64][32], b[32][256];
  const uint32_t from_a = address_of(product.a_operand), from_b = address_of(product.b_operand);
  const uint32_t unit = stride_of(product.b_operand, 32), slab = stride_of(product.b_operand, 16);
  const uint32_t row_bytes = row_bytes_of(product.b_operand);
  const int bytes = product.element_bytes, depth = 32 / bytes;
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < depth; ++k) {
      a[row][k] = product.has_fragments
                      ? fragment(product, row, k)
                      : element(product, from_a + (product.is_slab ? k / 8 * stride_of(product.a_operand, 32) + k % 8 * 128 + row * 2
                                                                   : row / 8 * stride_of(product.a_operand, 32) + row % 8 * 128 + k * bytes));
    }
  }
  for (int k = 0; k < depth; ++k) {
    for (int n = 0; n < product.n; ++n) {
      const uint32_t offset = product.is_columns ? n / 64 * slab + k / 8 * unit + k % 8 * 128 + n % 64 * 2
                                                 : n / 8 * unit + n % 8 * row_bytes + k * bytes;
      b[k][n] = element(product, from_b + offset, row_bytes);
    }
  }
  for (int row = 0; row < 64; ++row) {
    float sums[256] = {};
    for (int k = 0; k < depth; ++k) {
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
  product.element_bytes = sizeof(T);
  product.a_operand = a_operand, product.b_operand = b_operand;
  product.n = N, product.has_fragments = a != nullptr, product.is_columns = is_columns, product.adds = adds != 0;
  product.is_slab = is_slab;
  if (++product.num_threads == 128 && group.queue.size() == index - group.num_done + 1 && std::rand() % 3 == 0) {
    while (group.num_done <= index) group.advance();
  }
}

}  // namespace emulator
