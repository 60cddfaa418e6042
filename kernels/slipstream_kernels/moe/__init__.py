"""Routing tokens to experts, and experts' products.

Contracts here; cuda/ (host part, choice of variant), library/ (torch), reference/ (torch), triton/ (Triton-lang).
"""
