"""Attention over a paged KV cache: decode, verification, prompts.

Contracts here; cuda/ (host part, choice of variant), reference/ (torch), triton/ (Triton-lang).
"""
