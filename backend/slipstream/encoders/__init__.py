"""Encoder models beside the LLM (safety, quality, embeddings) and the pipeline that guards an answer with them.

Runs in Triton's Python backend, one process per model instance. numpy and tokenizers only; torch, onnxruntime and
TensorRT are imported by the one file that needs each. Knows of slipstream.core's errors and of nothing else here.
"""
