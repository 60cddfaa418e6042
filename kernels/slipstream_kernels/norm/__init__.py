"""Norms and activations, with quantised results as well.

Contracts here; reference/ (torch), triton/ (Triton-lang).
"""
