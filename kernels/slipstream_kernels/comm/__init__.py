"""Collective operations of a step between the GPUs of one host, in CUDA C++ (cuda/)."""
