// Eight bytes of another CTA's shared memory as thin inline PTX. Device code only; no framework header.
#pragma once

#include "ptx/cluster.cuh"

namespace slipstream {

// remote: of address_in.
__device__ __forceinline__ float2 load_remote_8(uint32_t remote) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(remote) : "memory");
  return v;
}

}  // namespace slipstream
