"""Slipstream's kernels, by family: gemm, moe, attention, norm, sample, spec, kv, fused_decode.

In each: contracts, below them reference/ (torch), triton/ (Triton-lang), cuda/ (host part, choice of variant).  csrc/
is the device code; triton/ and cuda/ at the top are what all families share to launch it.  Stands alone on torch and
triton; knows nothing of requests, schedulers or models.  Import only `slipstream_kernels.ops`.
"""
