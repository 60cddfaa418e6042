"""Shared by kernels in Triton-lang, which run on CUDA tensors; with TRITON_INTERPRET=1 also on CPU tensors (slow, for
tests).
"""
