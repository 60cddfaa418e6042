// The pace of weights that a CTA copies while the kernel before its own still runs.
//
// As fast as it can be filled, a ring is a queue of 4 to 5 us in front of the memory, at whose end what the kernel before
// still reads waits: the rows of a norm, which took 3.6 us and not 1.6, or keys. So copies of the first round are issued a
// little slower than memory serves them, until the first stage has been multiplied: then that kernel has ended.
#pragma once

#include <cstdint>

#include "ptx/hopper_copy.cuh"

namespace slipstream {

class CopyPace {
 public:
  // bytes_per_clock: of this CTA; 0: as fast as it can. first_empty: the barrier that the consumers of stage 0 arrive at.
  __device__ __forceinline__ CopyPace(int bytes_per_clock, uint32_t first_empty)
      : bytes_per_clock_(bytes_per_clock), first_empty_(first_empty), begin_(now()) {}

  // Returns when a copy may follow so many bytes of the first round. Not for later rounds: the barrier's parity would mean
  // something else then.
  __device__ __forceinline__ void wait(int bytes_before) const {
    while ((now() - begin_) * bytes_per_clock_ < bytes_before) {
      if (bytes_per_clock_ == 0 || has_ended(first_empty_, 0)) return;
    }
  }

 private:
  // In clocks of the SM.
  static __device__ __forceinline__ int64_t now() {
    int64_t clocks;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clocks));
    return clocks;
  }

  int bytes_per_clock_;
  uint32_t first_empty_;
  int64_t begin_;
};

}  // namespace slipstream
