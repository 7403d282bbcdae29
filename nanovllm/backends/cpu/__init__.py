"""The optional CPU backend: Numba kernels, paged attention with them, and packed weights."""
