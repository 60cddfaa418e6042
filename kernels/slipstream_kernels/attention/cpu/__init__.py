"""See slipstream_kernels.attention.  Attention on CPUs."""
