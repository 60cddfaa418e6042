// The multiplying warpgroups: codes become 16-bit operands in registers, exactly; the sums of a group are multiplied by
// its scale in fp32.
#pragma once

#include "hopper_copy.cuh"
#include "int4_codec.cuh"
#include "int4_stream_load.cuh"
#include "wgmma_registers.cuh"

namespace slipstream {

__device__ __forceinline__ void begin_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_registers() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void await_registers() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Where a thread is in its walk over groups: the sums of one group are multiplied by its scale while the products of the
// next run, so there are two of everything that a group has.
template <typename SHAPE>
struct Multiplier {
  using T = typename SHAPE::Operand;
  static constexpr int kSteps = 4 / SHAPE::kGroups;   // of 32 input features, in a group
  const Ring<SHAPE>& ring;
  int warp, lane;                                     // warp of 8: rows 16 warp .. 16 warp + 15 of the tile
  RingPlace<SHAPE::kStages> place, finished;          // of the products, and of what is added
  uint32_t a[kSteps][2][4];                           // operands: by step, product of 16, register
  float parts[SHAPE::kSets][SHAPE::kSums];
  float scales[SHAPE::kSets][2];                      // of a group's two rows

  // Multiplies blocks and adds them to sums, each group's part times its scale.
  __device__ __forceinline__ void consume(int num_blocks, float (&sums)[SHAPE::kSums]) {
    if constexpr (SHAPE::kSets == 1) {
#pragma unroll 1
      for (int i = 0; i < num_blocks; ++i) {
        start_block();
        multiply_group<0, 0>(false, sums);
        if constexpr (SHAPE::kGroups == 2) multiply_group<1, 0>(false, sums);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i + 1 < num_blocks; i += 2) {
        start_block();
        multiply_group<0, 0>(i > 0, sums);
        start_block();
        multiply_group<0, 1>(true, sums);
      }
      if (num_blocks % 2 == 0) return finish<1>(sums);
      start_block();
      multiply_group<0, 0>(num_blocks > 1, sums);
      finish<0>(sums);
    }
  }

 private:
  __device__ __forceinline__ void start_block() const { wait_barrier(ring.filled(place.stage), place.parity); }

  __device__ __forceinline__ uint32_t word_of(int row, int group) const {
    return load_shared_4(ring.words(place.stage) + ((16 * warp + row) * SHAPE::kGroups + group) * 4);
  }

  // Adds the parts in a set; after the block's last group its stage is free.
  template <int SET>
  __device__ __forceinline__ void add_parts(bool is_last, float (&sums)[SHAPE::kSums]) {
#pragma unroll
    for (int i = 0; i < SHAPE::kSums; ++i) {
      asm volatile("" : "+f"(parts[SET][i])::"memory");
      sums[i] += scales[SET][i / 2 % 2] * parts[SET][i];
    }
    if (!is_last) return;
    __syncwarp();
    if (lane == 0) arrive(ring.emptied(finished.stage));
    finished.advance();
  }

  template <int SET>
  __device__ __forceinline__ void finish(float (&sums)[SHAPE::kSums]) {
    await_registers<0>();
    add_parts<SET>(true, sums);
  }

  template <int SET>
  __device__ __forceinline__ void start_step(int step, int index) {
    const uint64_t tokens = core_matrices(ring.activations(place.stage), SHAPE::kColumns * 16);
    begin_registers();
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const uint64_t b = tokens + ((2 * step + product) * SHAPE::kColumns * 32 >> 4);
      multiply_registers<T, SHAPE::kColumns>(parts[SET], a[index][product], b, index + product);
    }
    commit_registers();
  }

  // Starts the products of a group into parts[SET]. With two sets, then adds those of the group before, else these.
  template <int GROUP, int SET>
  __device__ __forceinline__ void multiply_group(bool has_before, float (&sums)[SHAPE::kSums]) {
    const uint32_t codes = ring.codes(place.stage) + warp * 1024 + lane * 8 + GROUP * kSteps * 256;
    const uint32_t words[2] = {word_of(lane / 4, GROUP), word_of(lane / 4 + 8, GROUP)};
    uint2 eights[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) eights[i] = load_shared_8(codes + i * 256);
    const Codec<T> upper(words[0] >> 16), lower(words[1] >> 16);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      await_registers<kSteps - 1>();   // the products that read these registers have ended
      asm volatile("" : "+r"(eights[i].x), "+r"(eights[i].y)::"memory");
      uint32_t top[4], bottom[4];
      upper.expand(eights[i].x, top);
      lower.expand(eights[i].y, bottom);
#pragma unroll
      for (int product = 0; product < 2; ++product) {
        a[i][product][0] = top[2 * product], a[i][product][1] = bottom[2 * product];
        a[i][product][2] = top[2 * product + 1], a[i][product][3] = bottom[2 * product + 1];
      }
      start_step<SET>(GROUP * kSteps + i, i);
    }
    if constexpr (SHAPE::kSets == 2) {
      await_registers<kSteps>();   // the group before has ended
      if (has_before) add_parts<1 - SET>(true, sums);
    }
    scales[SET][0] = scale_of(words[0]), scales[SET][1] = scale_of(words[1]);
    if constexpr (SHAPE::kSets == 1) {
      await_registers<0>();
      add_parts<SET>(GROUP == SHAPE::kGroups - 1, sums);
    }
    if constexpr (GROUP == SHAPE::kGroups - 1) place.advance();
  }
};

}  // namespace slipstream
