"""See slipstream_kernels.kv."""
