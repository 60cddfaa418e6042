"""Speculative decoding on the device: verification of drafts and the inputs of the next step.

Contracts here; reference/ (torch), triton/ (Triton-lang).
"""
