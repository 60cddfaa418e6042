"""Quantisation methods, filled by plain imports."""

from slipstream.nn.quant import fp8, fp8_block, int4, int8, mxfp4, unquantized  # noqa: F401  (register themselves)
from slipstream.nn.quant.choose import NAMES, Methods, choose_methods
from slipstream.nn.quant.method import FREE_TOKENS, QUANT_METHODS, QuantMethod, linear_bytes

__all__ = ["FREE_TOKENS", "NAMES", "QUANT_METHODS", "Methods", "QuantMethod", "choose_methods", "linear_bytes"]
