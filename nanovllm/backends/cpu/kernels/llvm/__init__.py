"""What Numba cannot say in Python: calls of LLVM's functions, vectors, and dot products."""
