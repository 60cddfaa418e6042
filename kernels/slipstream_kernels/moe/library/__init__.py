"""See slipstream_kernels.moe."""
