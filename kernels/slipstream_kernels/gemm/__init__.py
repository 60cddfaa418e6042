"""Dense products and the quantisation of their operands.

Contracts here; cuda/ (host part, choice of variant), library/ (torch), reference/ (torch), triton/ (Triton-lang).
"""
