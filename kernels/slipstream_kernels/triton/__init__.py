"""What kernels in Triton-lang share. They run on CUDA tensors;
with TRITON_INTERPRET=1 they run on CPU tensors as well (slowly, for tests).
"""
