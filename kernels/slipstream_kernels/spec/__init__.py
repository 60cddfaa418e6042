"""Speculative decoding: drafts verified, and the inputs of the next step, on the device.

Contracts here; reference/ (torch), triton/ (Triton-lang).
"""
