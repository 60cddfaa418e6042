// Hopper's asynchronous machinery as thin inline PTX: mbarriers, tensor copies (TMA), register budgets, named barriers.
// Device code only; no framework header.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace slipstream {

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a __syncthreads must follow.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that copies will complete on the barrier's current phase.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}

// Whether a barrier's phase of this parity has ended, and the one after it has not.
__device__ __forceinline__ bool has_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}" : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
  return ended != 0;
}

// Copies the map's box at (x, y, z) to shared memory; what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

// Copies `bytes` contiguous bytes, a multiple of 16 as are both addresses.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads by tensor cores or the copy engine.
__device__ __forceinline__ void fence_shared_for_engines() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Named barriers of some warps of a CTA; 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// The same without waiting: for those who only tell the others.
__device__ __forceinline__ void arrive_threads(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// A position in a ring of STAGES buffers, and the parity of its current round.
template <int STAGES>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

}  // namespace slipstream
