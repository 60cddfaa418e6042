"""Sampling: penalties, filters, drawing, log-probabilities.

Contracts here; cuda/ (host part, choice of variant), reference/ (torch), triton/ (Triton-lang).
"""
