"""See slipstream_kernels.norm."""
