"""See slipstream_kernels.attention."""
