"""Slipstream's kernels: every operation as a contract (ops), in plain torch (reference) and in Triton-lang (triton).

Stands alone on torch and triton; knows nothing of requests, schedulers or models.  Import only
`slipstream_kernels.ops`.
"""
