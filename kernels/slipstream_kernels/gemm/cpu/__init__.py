"""See slipstream_kernels.gemm.  Products on x86 CPUs, by what torch and oneDNN have."""
