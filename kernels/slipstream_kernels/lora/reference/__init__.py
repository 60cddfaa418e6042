"""See slipstream_kernels.lora."""
