"""The parts of build/train_heads.py: the heads as networks, the frozen model they learn from, data, training, export.

Stands alone: imports neither slipstream nor slipstream_kernels. Needs torch, transformers and safetensors.
"""
