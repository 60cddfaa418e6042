"""See slipstream_kernels.fused_decode."""
