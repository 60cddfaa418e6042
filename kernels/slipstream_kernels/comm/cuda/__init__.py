"""See slipstream_kernels.comm."""
