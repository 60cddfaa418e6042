"""The operations in Triton-lang, for CUDA tensors;
with TRITON_INTERPRET=1 they run on CPU tensors as well (slowly, for tests).
"""
