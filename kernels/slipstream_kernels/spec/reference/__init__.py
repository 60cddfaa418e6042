"""See slipstream_kernels.spec."""
