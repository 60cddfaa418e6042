// Thread block clusters as thin inline PTX: their barrier, other CTAs' shared memory, copies to several CTAs at once.
// Device code only; no framework header.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace slipstream {

// The barrier of all threads of a cluster that have not ended. Each arrives, then waits.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Where another CTA of the cluster has what lies at this address of one's own shared memory.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// remote: of address_in.
__device__ __forceinline__ float4 load_from_cluster(uint32_t remote) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
  return v;
}

// Waits for the end of the phase of this parity; what other CTAs wrote before they arrived can be read.
__device__ __forceinline__ void wait_barrier_of_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}

// Writes to another CTA's shared memory; its barrier counts the 16 bytes.
__device__ __forceinline__ void send(uint32_t remote, const float (&v)[4], uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])), "r"(__float_as_uint(v[3])),
      "r"(remote_barrier) : "memory");
}

// Hints to the L2 cache, as createpolicy encodes them.
constexpr uint64_t kReadOnce = 0x12F0000000000000;   // evict first
constexpr uint64_t kReadNormally = 0x1000000000000000;
constexpr uint64_t kReadOften = 0x14F0000000000000;  // evict last

// Copies the map's box at (x, y, z, w) to shared memory.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int x,
                                         int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w),
      "l"(hint) : "memory");
}

// Copies the map's box at (x, y, z) to shared memory; what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(hint)
      : "memory");
}

// Copies the map's box at (x, y); what lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int x,
                                         int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(hint) : "memory");
}

}  // namespace slipstream
