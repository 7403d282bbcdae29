"""The optional GPU backend: Triton kernels, paged attention with them, and CUDA graphs."""
