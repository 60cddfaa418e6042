"""Triton's Python backend finds its class here; it is slipstream.encoders.serving.QualityModel."""

from slipstream.encoders.serving import QualityModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
