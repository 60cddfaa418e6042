"""See slipstream_kernels.sample."""
