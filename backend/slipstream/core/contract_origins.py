"""Whose clients send a tensor or read it: the backends whose contracts are served, and this one's own additions."""

from __future__ import annotations

VLLM = "vLLM"
TRT_ENSEMBLE = "TensorRT-LLM ensemble"
TRT_CORE = "TensorRT-LLM tensorrt_llm"
TRT_LLMAPI = "TensorRT-LLM llmapi"
TRT_PREPROCESSING = "TensorRT-LLM preprocessing"
TRT_POSTPROCESSING = "TensorRT-LLM postprocessing"
SLIPSTREAM = "Slipstream"
