"""See slipstream_kernels.gemm."""
