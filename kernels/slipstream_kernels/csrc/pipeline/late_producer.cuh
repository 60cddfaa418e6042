// For tests: a producer that comes late to every stage. Results do not depend on the order in which producers arrive.
#pragma once

// Which of the kernel's producers is late; -1: none.
#ifndef SLIPSTREAM_LATE_PRODUCER
#define SLIPSTREAM_LATE_PRODUCER -1
#endif

namespace slipstream {

// Called by each producer at each stage.
__device__ __forceinline__ void delay_late_producer(int producer) {
  if (producer == SLIPSTREAM_LATE_PRODUCER) __nanosleep(20000);
}

}  // namespace slipstream
