// Programmatic dependent launch. The rules that all kernels of a step keep: slipstream_kernels/dependent_launch.py.
#pragma once

namespace slipstream {

// The first instruction of a kernel: lets the next one come up once all CTAs of this one have called it or ended.
__device__ __forceinline__ void start_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Ends when the kernel before has ended and what it wrote can be read. Every CTA calls it, also one without work.
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace slipstream
