"""Triton's Python backend finds its class here; it is slipstream.encoders.guarded_serving.GuardedModel."""

from slipstream.encoders.guarded_serving import GuardedModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
