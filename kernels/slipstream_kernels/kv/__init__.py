"""The paged KV cache: writing keys and values, moving accepted ones, formats of stored numbers.

Contracts here; reference/ (torch), triton/ (Triton-lang).
"""
