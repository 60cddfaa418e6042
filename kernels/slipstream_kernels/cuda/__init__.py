"""CUDA versions of the operations, built for Hopper (sm_90a) when first used.  Import only through ops."""
