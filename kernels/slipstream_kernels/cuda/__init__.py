"""What kernels in CUDA share: building libraries for Hopper (sm_90a) when first used, loading and launching them."""
