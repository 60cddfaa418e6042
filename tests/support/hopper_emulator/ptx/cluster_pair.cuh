// The emulator's cluster_pair.cuh.
#pragma once

#include "ptx/cluster.cuh"

namespace slipstream {

inline float2 load_remote_8(uint32_t remote) {
  float2 value;
  std::memcpy(&value, emulator::shared_in_cluster(remote), sizeof(value));
  return value;
}

}  // namespace slipstream
