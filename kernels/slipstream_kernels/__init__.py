"""Slipstream's kernels, by family: gemm, moe, attention, lora, norm, sample, spec, kv, comm.

In each: contracts, reference/ (torch), triton/ (Triton-lang), cuda/ (host part, choice of variant).  csrc/ is the
device code; triton/ and cuda/ at the top level are shared by all families.  Depends on torch and triton only; knows no
requests, schedulers or models.  Import only `slipstream_kernels.ops`; sums over ranks (comm) have no op.
"""
