"""Triton's Python backend finds its class here; it is slipstream.encoders.serving.SafetyModel."""

from slipstream.encoders.serving import SafetyModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
