"""Quantisation methods, filled by plain imports."""

from slipstream.nn.quant import unquantized  # noqa: F401  (registers itself)
from slipstream.nn.quant.method import QUANT_METHODS, QuantMethod

__all__ = ["QUANT_METHODS", "QuantMethod"]
