"""What GPUs say to each other inside a step, faster than a library says it. cuda/: in CUDA C++."""
