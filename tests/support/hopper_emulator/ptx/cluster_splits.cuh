// The emulator's cluster_splits.cuh.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/memory_access.cuh"

namespace slipstream {

inline int split_begin(uint32_t total, uint32_t index, uint32_t count) { return static_cast<int>(total * index / count); }
inline void prefetch_map(const CUtensorMap*) {}
inline float4 load_own(uint32_t address) { return load_shared<float4>(address); }

}  // namespace slipstream
