"""Shared by CUDA kernels: building libraries for Hopper (sm_90a) on first use, loading and launching them."""
