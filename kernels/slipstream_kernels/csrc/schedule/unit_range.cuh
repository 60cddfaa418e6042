// A share of the output. Also compiled for the host, by tests.
#pragma once

#ifndef __CUDACC__
#define __device__
#define __forceinline__ inline
#endif

namespace slipstream {

// Consecutive units of the output.
struct UnitRange {
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
};

}  // namespace slipstream
