"""The paged KV cache: writing keys and values, compacting accepted ones, storage formats.

Contracts here; reference/ (torch), triton/ (Triton-lang).
"""
