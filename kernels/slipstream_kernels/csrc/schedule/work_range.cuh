// A range of work items. Tests compile it for the host, too.
#pragma once

#ifndef __CUDACC__
#define __device__
#define __forceinline__ inline
#endif

namespace slipstream {

// Consecutive outputs, tiles or units.
struct WorkRange {
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
};

}  // namespace slipstream
