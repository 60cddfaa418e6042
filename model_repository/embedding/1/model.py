"""Triton's Python backend finds its class here; it is slipstream.encoders.serving.EmbeddingModel."""

from slipstream.encoders.serving import EmbeddingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
