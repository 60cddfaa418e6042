"""From logits to tokens: penalties, filters, the draw, log-probabilities.

Contracts here; cuda/ (host part, choice of variant), reference/ (torch), triton/ (Triton-lang).
"""
