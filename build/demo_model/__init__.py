"""The parts of build/train_demo_model.py: corpus, tokenizer, packing, training, export, evaluation.

Stands alone: imports neither slipstream nor slipstream_kernels. `network` and `train` need torch only.
"""
