"""Products of LoRA adapters, of the one that each row of a step has.

Contracts here; reference/ (torch), triton/ (Triton-lang).
"""
